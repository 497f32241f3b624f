//! Every reduction kernel next to a loop that reads and writes the same memory and computes next to nothing: what share
//! of the machine's rate the kernel has.
//!
//! A share is the median over turns of both. Arguments: words of which one must be part of `isa/op/dtype/form/place`, and `--json`.

use std::hint::black_box;
use std::process::ExitCode;

use accl_benches::pin::{self, Pinned};
use accl_benches::place::Place;
use accl_benches::plain_loops::PlainLoops;
use accl_benches::sweep;
use accl_benches::turns::beside;
use accl_kernels::{Finish, Isa, Reducer, available_isas, supports};
use accl_types::{Dtype, ReduceOp};

/// Sources of a reduction of many.
const MANY: usize = 4;
const WORLD: u32 = 3;

/// What a call reads and writes.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// `y = y op x`
    InPlace,
    /// `z = x op y`
    Pair,
    /// `z = a op b op c op d`
    Many,
}

impl Form {
    const ALL: [Form; 3] = [Form::InPlace, Form::Pair, Form::Many];

    fn name(self) -> &'static str {
        match self {
            Form::InPlace => "in_place",
            Form::Pair => "pair",
            Form::Many => "many",
        }
    }
}

struct Buffers {
    sources: [Vec<u64>; MANY],
    result: Vec<u64>,
}

impl Buffers {
    fn new() -> Self {
        let words = || vec![0; Place::Dram.bytes() / 8];
        Self { sources: std::array::from_fn(|_| words()), result: words() }
    }

    /// Ones: sums of them end where one more is rounded away, so that no dtype meets NaN, infinity or denormals, on which
    /// processors may be slow.
    fn fill(&mut self, dtype: Dtype) {
        let one: &[u8] = match dtype {
            Dtype::F16 => &half::f16::ONE.to_ne_bytes(),
            Dtype::BF16 => &half::bf16::ONE.to_ne_bytes(),
            Dtype::F32 => &1.0_f32.to_ne_bytes(),
            Dtype::F64 => &1.0_f64.to_ne_bytes(),
            Dtype::C64 => &[1.0_f32, 0.0].map(f32::to_ne_bytes).concat(),
            Dtype::C128 => &[1.0_f64, 0.0].map(f64::to_ne_bytes).concat(),
            _ => &[1],
        };
        let bytes: Vec<u8> = one.iter().copied().cycle().take(16).collect();
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect();
        for buffer in self.sources.iter_mut().chain([&mut self.result]) {
            buffer.chunks_exact_mut(2).for_each(|pair| pair.copy_from_slice(&words));
        }
    }
}

/// What was found of one kernel.
struct Found {
    isa: Isa,
    op: ReduceOp,
    dtype: Dtype,
    form: Form,
    place: Place,
    /// Bytes of the result per nanosecond.
    rate: f64,
    loop_rate: f64,
    share: f64,
}

impl Found {
    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "isa": self.isa.name(),
            "op": self.op.name(),
            "dtype": self.dtype.name(),
            "form": self.form.name(),
            "place": self.place.name(),
            "gb_s": self.rate,
            "loop_gb_s": self.loop_rate,
            "share": self.share,
        })
    }

    fn to_line(&self) -> String {
        format!(
            "{:>8} {:>12} {:>12} {:>9} {:>6} {:>9.2} {:>9.2} {:>7.3}",
            self.isa.name(),
            self.op.name(),
            self.dtype.name(),
            self.form.name(),
            self.place.name(),
            self.rate,
            self.loop_rate,
            self.share
        )
    }
}

fn main() -> ExitCode {
    let (options, words): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|word| word.starts_with('-'));
    let json = options.iter().any(|option| option == "--json");
    let _pinned = Pinned::new(0, 1, &pin::cores());
    if !json {
        println!(
            "{:>8} {:>12} {:>12} {:>9} {:>6} {:>9} {:>9} {:>7}",
            "isa", "op", "dtype", "form", "place", "GB/s", "loop GB/s", "share"
        );
    }
    let mut buffers = Buffers::new();
    let mut all = Vec::new();
    for (op, dtype) in combinations() {
        let mut filled = false;
        for isa in available_isas() {
            for form in Form::ALL {
                for place in Place::ALL {
                    let id = [isa.name(), op.name(), dtype.name(), form.name(), place.name()].join("/");
                    if !words.is_empty() && !words.iter().any(|word| id.contains(word.as_str())) {
                        continue;
                    }
                    if !std::mem::replace(&mut filled, true) {
                        buffers.fill(dtype);
                    }
                    let found = measure(&mut buffers, (isa, op, dtype), form, place);
                    if !json {
                        println!("{}", found.to_line());
                    }
                    all.push(found.to_json());
                    if sweep::is_test() {
                        return ExitCode::SUCCESS;
                    }
                }
            }
        }
    }
    if json {
        println!("{}", serde_json::Value::Array(all));
    }
    ExitCode::SUCCESS
}

/// PREMUL_SUM is the kernel of SUM.
fn combinations() -> impl Iterator<Item = (ReduceOp, Dtype)> {
    let ops = ReduceOp::ALL.iter().filter(|&&op| op != ReduceOp::PremulSum);
    ops.flat_map(|&op| Dtype::ALL.iter().map(move |&dtype| (op, dtype))).filter(|&(op, dtype)| supports(op, dtype))
}

fn measure(buffers: &mut Buffers, (isa, op, dtype): (Isa, ReduceOp, Dtype), form: Form, place: Place) -> Found {
    let reducer = Reducer::with_isa(op, dtype, WORLD, isa).unwrap_or_else(|error| panic!("{error}"));
    let plain = PlainLoops::of(isa);
    let (bytes, count) = (place.bytes(), place.bytes() / dtype.size_bytes());
    let finish = if matches!(form, Form::InPlace) { Finish::No } else { Finish::Yes };

    let kernel = |buffers: &mut Buffers| {
        let dst = buffers.result.as_mut_ptr().cast::<u8>();
        let sources = buffers.sources.each_ref().map(|source| source.as_ptr().cast::<u8>());
        // SAFETY: each buffer holds the bytes of every place, they are apart, and nobody else uses them meanwhile.
        unsafe {
            match form {
                Form::InPlace => reducer.pair(dst, dst, black_box(sources[0]), count, finish),
                Form::Pair => reducer.pair(dst, black_box(sources[0]), sources[1], count, finish),
                Form::Many => reducer.many(dst, black_box(&sources), count, finish),
            }
        }
    };
    let reference = |buffers: &mut Buffers| {
        let result = &mut buffers.result[..bytes / 8];
        let [a, b, c, d] = buffers.sources.each_ref().map(|source| &source[..bytes / 8]);
        match form {
            Form::InPlace => plain.in_place(result, black_box(a)),
            Form::Pair => plain.pair(result, black_box(a), b),
            Form::Many => plain.many(result, black_box([a, b, c, d])),
        }
    };

    let found = beside(buffers, place, reference, kernel);
    Found {
        isa,
        op,
        dtype,
        form,
        place,
        rate: bytes as f64 / found.ns,
        loop_rate: bytes as f64 / found.reference_ns,
        share: found.share,
    }
}

//! Every reduction kernel, compared with a loop that reads and writes the same memory and computes almost nothing: the
//! kernel's share of the machine's rate.
//!
//! A share is the median over alternating turns. Arguments: words, of which one must be part of
//! `isa/op/dtype/form/level`, and `--json`.

use std::hint::black_box;
use std::process::ExitCode;

use accl_benches::arguments::Arguments;
use accl_benches::memory_level::MemoryLevel;
use accl_benches::pin::{self, Pinned};
use accl_benches::plain_loops::PlainLoops;
use accl_benches::sweep;
use accl_benches::turns::{Comparison, compare};
use accl_kernels::{Finish, Isa, Reducer, available_isas, supports};
use accl_types::{Dtype, ReduceOp};

/// Number of sources of a reduction of many.
const MANY: usize = 4;
const WORLD: u32 = 3;

/// Operands of a call.
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
    /// Type of the ones that the buffers hold now.
    filled: Option<Dtype>,
}

impl Buffers {
    fn new() -> Self {
        let words = || vec![0; MemoryLevel::Dram.bytes() / 8];
        Self { sources: std::array::from_fn(|_| words()), result: words(), filled: None }
    }

    /// Fills all buffers with ones. A growing sum stops when adding one is rounded away, so no dtype meets NaN,
    /// infinity or denormals, which may be slow.
    fn fill(&mut self, dtype: Dtype) {
        if self.filled.replace(dtype) == Some(dtype) {
            return;
        }
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

/// A combination to measure.
struct KernelCase {
    op: ReduceOp,
    dtype: Dtype,
    isa: Isa,
    form: Form,
    level: MemoryLevel,
}

impl KernelCase {
    fn id(&self) -> String {
        let KernelCase { op, dtype, isa, form, level } = self;
        [isa.name(), op.name(), dtype.name(), form.name(), level.name()].join("/")
    }

    /// Returns bytes of the result per nanosecond.
    fn rate(&self, ns: f64) -> f64 {
        self.level.bytes() as f64 / ns
    }

    fn to_json(&self, found: &Comparison) -> serde_json::Value {
        serde_json::json!({
            "isa": self.isa.name(),
            "op": self.op.name(),
            "dtype": self.dtype.name(),
            "form": self.form.name(),
            "place": self.level.name(),
            "gb_s": self.rate(found.ns),
            "loop_gb_s": self.rate(found.reference_ns),
            "share": found.share,
        })
    }

    fn to_line(&self, found: &Comparison) -> String {
        let (rate, loop_rate) = (self.rate(found.ns), self.rate(found.reference_ns));
        format!("{:>40} {rate:>9.2} {loop_rate:>9.2} {:>7.3}", self.id(), found.share)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::of_process();
    let _pinned = Pinned::new(0, 1, &pin::cores());
    arguments.say(&format!("{:>40} {:>9} {:>9} {:>7}", "", "GB/s", "loop GB/s", "share"));
    let mut buffers = Buffers::new();
    let mut all = Vec::new();
    for case in cases().iter().filter(|case| arguments.want(&case.id())) {
        buffers.fill(case.dtype);
        let found = measure(&mut buffers, case);
        arguments.say(&case.to_line(&found));
        all.push(case.to_json(&found));
        if sweep::is_test() {
            break;
        }
    }
    arguments.end(all);
    ExitCode::SUCCESS
}

/// Returns every kernel in every form and at every level.
fn cases() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (op, dtype) in combinations() {
        for isa in available_isas() {
            let of = |form, level| KernelCase { op, dtype, isa, form, level };
            cases.extend(Form::ALL.into_iter().flat_map(|form| MemoryLevel::ALL.map(|level| of(form, level))));
        }
    }
    cases
}

/// Returns the supported pairs of operator and type, without PREMUL_SUM, whose kernel is that for SUM.
fn combinations() -> impl Iterator<Item = (ReduceOp, Dtype)> {
    let ops = ReduceOp::ALL.iter().filter(|&&op| op != ReduceOp::PremulSum);
    ops.flat_map(|&op| Dtype::ALL.iter().map(move |&dtype| (op, dtype))).filter(|&(op, dtype)| supports(op, dtype))
}

fn measure(buffers: &mut Buffers, case: &KernelCase) -> Comparison {
    let KernelCase { op, dtype, isa, form, level } = *case;
    let reducer = Reducer::with_isa(op, dtype, WORLD, isa).unwrap_or_else(|error| panic!("{error}"));
    let plain = PlainLoops::of(isa);
    let (bytes, count) = (level.bytes(), level.bytes() / dtype.size_bytes());
    let finish = if matches!(form, Form::InPlace) { Finish::No } else { Finish::Yes };

    let kernel = |buffers: &mut Buffers| {
        let dst = buffers.result.as_mut_ptr().cast::<u8>();
        let sources = buffers.sources.each_ref().map(|source| source.as_ptr().cast::<u8>());
        // SAFETY: each buffer holds the bytes of every level, the buffers do not overlap, and no other code uses them
        // during the call.
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

    compare(buffers, level, reference, kernel)
}

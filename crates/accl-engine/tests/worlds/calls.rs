//! Short forms of encoded calls for the tests of encoding.

use std::sync::Arc;

use accl_engine::codec::{Codec, Rounding, Settings, codec};
use accl_engine::{ALGORITHMS, Blocks, CallDesc, Mode, TensorDesc};
use accl_engine::{Codecs, Encoding, TensorCodecs};
use accl_schedule::{Encodes, Topology};
use accl_testkit::{Member, Rng, WorldOptions};
use accl_types::{Collective, Dtype, Elems, ReduceOp};

/// Returns random values from -1 to 1.
pub fn data(rank: usize, count: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed << 8 | rank as u64);
    (0..count).map(|_| (rng.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

pub fn max_min(bits: u8, bucket: u32, rounding: Rounding) -> Arc<dyn Codec> {
    codec("maxmin").unwrap().build(&Settings { bits, bucket, rounding, ..Settings::default() }).unwrap()
}

pub fn raw() -> Arc<dyn Codec> {
    codec("raw").unwrap().build(&Settings::default()).unwrap()
}

pub fn both_ways(codec: Arc<dyn Codec>, id: u64) -> TensorCodecs {
    TensorCodecs { intra_node: raw(), reduce: codec.clone(), result: codec, id }
}

pub fn encoding(tensors: Vec<TensorCodecs>) -> Encoding {
    Encoding { codecs: Codecs::new(tensors).unwrap(), seed: 11, step: 3, residuals: None, probe: None }
}

pub fn tensor<T>(data: &[T], dtype: Dtype) -> TensorDesc {
    assert_eq!(size_of::<T>(), dtype.size_bytes());
    TensorDesc::dense(data.as_ptr().cast_mut().cast(), dtype, Elems(data.len() as u64))
}

pub fn all_reduce(member: &Member, data: &mut [f32], op: ReduceOp, encoding: &Encoding) {
    let mut desc = member.all_reduce_desc(data, op, Mode::Blocking);
    desc.encoding = encoding.clone().into();
    member.call(desc).unwrap();
}

pub fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Names of the algorithms of a collective that can encode on these hosts; `hosts` holds the host of each rank.
pub fn rows(collective: Collective, hosts: &[u32]) -> Vec<&'static str> {
    let topology = Topology::new(hosts.to_vec());
    let fits = |row: &&accl_engine::Algorithm| {
        row.collective == collective && row.encodes != Encodes::No && (row.applies)(hosts.len() as u32, &topology)
    };
    ALGORITHMS.iter().filter(fits).map(|row| row.name).collect()
}

pub fn options(hosts: &[u32], collective: &str, algorithm: &str) -> WorldOptions {
    let mut options = WorldOptions::new(hosts.len() as u32).with("algorithm", &format!("{collective}={algorithm}"));
    options.hosts = hosts.iter().map(|host| format!("host{host}")).collect();
    options
}

/// Cuts `data` into consecutive blocks of these lengths.
pub fn blocks(data: &[f32], counts: &[usize]) -> Blocks {
    let mut rest = data;
    let mut block = |count: &usize| {
        let (block, after) = rest.split_at(*count);
        rest = after;
        [tensor(block, Dtype::F32)]
    };
    counts.iter().map(&mut block).collect()
}

pub fn encoded(collective: Collective, inputs: Blocks, outputs: Blocks, encoding: &Encoding) -> CallDesc {
    let mut desc = CallDesc::new(collective, Dtype::F32);
    (desc.inputs, desc.outputs, desc.encoding) = (inputs, outputs, encoding.clone().into());
    desc
}

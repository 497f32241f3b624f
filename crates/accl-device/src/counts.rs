//! Number of collectives that a device has done, by collective, dtype and operator.

use std::collections::BTreeMap;
use std::fmt;

use accl_engine::sync::Mutex;
use accl_types::{Collective, Dtype, ReduceOp};

/// Counts of the collectives that a device completed successfully.
#[derive(Default)]
pub(super) struct Counts(Mutex<BTreeMap<Key, u64>>);

/// Codes of collective, dtype and operator, so that counts are listed in the order of their tables.
type Key = (u8, u8, Option<u8>);

impl Counts {
    /// Counts a completed collective.
    pub(super) fn add(&self, collective: Collective, dtype: Dtype, op: ReduceOp) {
        let op = collective.reduces().then_some(op as u8);
        *self.0.lock().entry((collective as u8, dtype as u8, op)).or_default() += 1;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.0.lock();
        write!(f, "{} calls", counts.values().sum::<u64>())?;
        for (index, (&(collective, dtype, op), count)) in counts.iter().enumerate() {
            let collective = Collective::from_code(collective).map_or("?", Collective::name);
            let dtype = Dtype::from_code(dtype).map_or("?", Dtype::name);
            let op = op.and_then(ReduceOp::from_code).map(|op| format!(" {}", op.name())).unwrap_or_default();
            write!(f, "{} {collective} {dtype}{op} {count}", if index == 0 { ":" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_what_they_do() {
        let counts = Counts::default();
        assert_eq!(counts.to_string(), "0 calls");
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Sum] {
            counts.add(Collective::AllReduce, Dtype::I32, op);
            counts.add(Collective::AllGather, Dtype::Bool, op);
        }
        let text = counts.to_string();
        assert!(text.starts_with("6 calls: "), "{text}");
        for part in ["all_gather bool 3", "all_reduce int32 SUM 2", "all_reduce int32 MAX 1"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

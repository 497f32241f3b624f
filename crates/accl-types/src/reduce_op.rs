//! Reduce operators, with torch's names.

use std::fmt;

/// How contributions are combined. The discriminant is the code on the wire and across the C++ bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum in rank order.
    Sum = 0,
    /// Sum, then one division by the world size before the last rounding.
    Avg = 1,
    /// Product.
    Product = 2,
    /// Minimum; a NaN wins, and -0 is below +0.
    Min = 3,
    /// Maximum; a NaN wins, and +0 is above -0.
    Max = 4,
    /// Bitwise and.
    Band = 5,
    /// Bitwise or.
    Bor = 6,
    /// Bitwise exclusive or.
    Bxor = 7,
    /// Sum of the contributions, each multiplied by a factor first.
    PremulSum = 8,
}

impl ReduceOp {
    /// Every operator, in code order.
    pub const ALL: &'static [ReduceOp] = &[
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Band,
        ReduceOp::Bor,
        ReduceOp::Bxor,
        ReduceOp::PremulSum,
    ];

    /// The operator with this code, or `None`.
    pub fn from_code(code: u8) -> Option<ReduceOp> {
        Self::ALL.get(code as usize).copied()
    }

    /// The name in `torch.distributed.ReduceOp`.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "SUM",
            ReduceOp::Avg => "AVG",
            ReduceOp::Product => "PRODUCT",
            ReduceOp::Min => "MIN",
            ReduceOp::Max => "MAX",
            ReduceOp::Band => "BAND",
            ReduceOp::Bor => "BOR",
            ReduceOp::Bxor => "BXOR",
            ReduceOp::PremulSum => "PREMUL_SUM",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_leads_back_to_its_operator() {
        for (code, &op) in ReduceOp::ALL.iter().enumerate() {
            assert_eq!(op as usize, code);
            assert_eq!(ReduceOp::from_code(code as u8), Some(op));
        }
    }
}

//! Logarithms of small integers.

/// Largest power of two that is at most `n`.
///
/// # Panics
/// Panics when `n` is 0.
pub fn floor_power_of_two(n: u32) -> u32 {
    1 << floor_log2(n)
}

/// Logarithm to base 2, rounded down.
///
/// # Panics
/// Panics when `n` is 0.
pub fn floor_log2(n: u32) -> u32 {
    n.ilog2()
}

/// Logarithm to base 2, rounded up; 0 for 0 and 1.
pub fn ceil_log2(n: u32) -> u32 {
    if n <= 1 { 0 } else { floor_log2(n - 1) + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_enclose_their_number() {
        for n in 1..3000u32 {
            assert!(1 << floor_log2(n) <= n && n < 2 << floor_log2(n));
            assert!(1 << ceil_log2(n) >= n && (n == 1 || 1 << (ceil_log2(n) - 1) < n));
        }
    }
}

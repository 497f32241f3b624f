//! The loops of a randomized Hadamard rotation, compiled for each instruction set; `hadamard` describes what they
//! compute.

/// Elements that are first paired among themselves: a multiple of a vector.
const ROW_OF: usize = 16;

/// Rotates a bucket, whose length is a power of two of at least 64.
#[inline(always)]
pub(crate) fn rotate(values: &mut [f32], signs: &[f32]) {
    values.iter_mut().zip(signs).for_each(|(value, sign)| *value *= sign);
    pairs(values);
}

/// Rotates a bucket back. Every NaN becomes canonical, because the compiler decides which operand's payload a sum has.
#[inline(always)]
pub(crate) fn rotate_back(values: &mut [f32], signs: &[f32]) {
    pairs(values);
    for (value, sign) in values.iter_mut().zip(signs) {
        let back = *value * sign;
        *value = if back.is_nan() { f32::NAN } else { back };
    }
}

#[inline(always)]
fn pairs(values: &mut [f32]) {
    for row in values.chunks_exact_mut(ROW_OF) {
        if let Ok(row) = <&mut [f32; ROW_OF]>::try_from(row) {
            *row = neighbours(&neighbours(&neighbours(&neighbours(row))));
        }
    }
    let mut apart = ROW_OF;
    while 2 * apart < values.len() {
        // Two bits of the index at a time, which halves the passes over memory.
        for four in values.chunks_exact_mut(4 * apart) {
            let (ab, cd) = four.split_at_mut(2 * apart);
            let ((a, b), (c, d)) = (ab.split_at_mut(apart), cd.split_at_mut(apart));
            for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                let (p, q, r, s) = (*a + *b, *a - *b, *c + *d, *c - *d);
                (*a, *b, *c, *d) = (p + r, q + s, p - r, q - s);
            }
        }
        apart *= 4;
    }
    if apart < values.len() {
        let (a, b) = values.split_at_mut(apart);
        for (a, b) in a.iter_mut().zip(b) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// Returns the sums of neighbours, then their differences. Bit 0 of an index becomes the highest bit, so four calls
/// restore the order. Compilers vectorise this order.
#[inline(always)]
fn neighbours(row: &[f32; ROW_OF]) -> [f32; ROW_OF] {
    let mut result = [0.0; ROW_OF];
    for at in 0..ROW_OF / 2 {
        result[at] = row[2 * at] + row[2 * at + 1];
        result[at + ROW_OF / 2] = row[2 * at] - row[2 * at + 1];
    }
    result
}

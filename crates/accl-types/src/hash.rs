//! The one hash function that ranks compare: equal on every machine and in every build.

/// FNV-1a over words, with a shift so that high bits also affect the result.
pub fn hash_words(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        mixed ^ (mixed >> 29)
    })
}

/// Combines both halves of a hash by exclusive or.
pub fn fold(hash: u64) -> u32 {
    (hash ^ hash >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_length_count() {
        let lists: [&[u64]; 6] = [&[], &[0], &[0, 0], &[1, 2], &[2, 1], &[1 << 63]];
        for (i, a) in lists.iter().enumerate() {
            for b in &lists[i + 1..] {
                assert_ne!(hash_words(a.iter().copied()), hash_words(b.iter().copied()), "{a:?} and {b:?}");
            }
        }
    }
}

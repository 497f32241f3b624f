// Random bits of elements: the functions of accl-kernels' `codec/rng.rs`.
//
// Owns the hash, the strata of correlated rounding and their tables in shared memory. Does not know levels.

constexpr u32 NEAREST = 0;
constexpr u32 STOCHASTIC = 1;
constexpr u32 CORRELATED = 2;

// Elements that choose from the same permutations, and the number of these.
constexpr u64 STRATA_ELEMENTS = 1 << 14;
constexpr u32 TABLE = 16;

// Tables for the blocks of elements that one part of a tile touches.
struct Strata {
    u32 of_rank[2][TABLE];
};

DEVICE u32 mixed(u32 counter, u32 key)
{
    const u32 x = (counter ^ counter >> 16) * 0x7feb352d;
    const u32 y = (x ^ x >> 15 ^ key) * 0x846ca68b;
    return y ^ y >> 16;
}

DEVICE u64 hashed(u64 state, u64 part)
{
    u64 z = (state ^ part) + 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// Random bytes for the eight elements from `first` on, a multiple of 8: four in each word, the first in the lowest
// bits.
DEVICE void random_words(u32 (&words)[2], u64 key, u64 first)
{
    const u64 counter = first / 4;
    const u32 mixed_in = (u32)(key >> 32) ^ (u32)(counter >> 32) * 0x9e3779b9;
    const u32 start = (u32)counter + (u32)key;
    words[0] = mixed(start, mixed_in);
    words[1] = mixed(start + 1, mixed_in);
}

DEVICE bool has_strata(const Span &span) { return span.world > 0; }

// Finds the rank's stratum in each permutation for the elements from `first` on, at most STRATA_ELEMENTS of them. All
// threads of a block take part.
DEVICE void find_strata(Strata &strata, const Span &span, u64 first)
{
    if (THREAD < 2 * TABLE) {
        const u32 at = THREAD % TABLE;
        const u64 key = hashed(hashed(0, span.shared), first / STRATA_ELEMENTS + THREAD / TABLE);
        u32 stratum = span.rank;
        // Follows where the swaps of a shuffle move the rank.
        for (u32 place = span.world - 1; place > 0; place--) {
            const u32 random = mixed((u32)key + place * TABLE + at, (u32)(key >> 32));
            const u32 other = (u32)((u64)random * (place + 1) >> 32);
            stratum = stratum == place ? other : stratum == other ? place : stratum;
        }
        strata.of_rank[THREAD / TABLE][at] = stratum;
    }
    block_sync();
}

// Moves random bytes of eight elements from `first` on into the rank's strata. The tables begin at `begin`.
DEVICE void spread(u32 (&words)[2], const Strata &strata, const Span &span, u64 begin, u64 first)
{
    u32 picks[2];
    random_words(picks, span.shared, first);
    const u32 table = (u32)(first / STRATA_ELEMENTS - begin / STRATA_ELEMENTS), world = span.world;
#pragma unroll
    for (u32 word = 0; word < 2; word++) {
        u32 spread = 0;
#pragma unroll
        for (u32 at = 0; at < 32; at += 8) {
            const u32 pick = picks[word] >> at & 0xff;
            u32 stratum = strata.of_rank[table][pick % TABLE] + world * (pick / TABLE) / TABLE;
            stratum = stratum < world ? stratum : stratum - world;
            // The highest byte of the product is the quotient of the number and the ranks.
            const u64 n = (u64)stratum << 8 | (words[word] >> at & 0xff);
            spread |= (u32)(n * span.step >> 56) << at;
        }
        words[word] = spread;
    }
}

// The randomized Hadamard rotation of a bucket; accl-kernels' `codec/hadamard.rs` and `codec/rotation.rs` define it.
//
// Owns the order of sums and differences: bit 0 of an element's index first. Bits 0 to 2 are in a lane's registers, the
// next ones choose the lane, then the warp if the team is a block, then the row.

// Sums and differences of each COUNT neighbours among eight values.
template <u32 COUNT> DEVICE void pair(float (&x)[EIGHT])
{
#pragma unroll
    for (u32 apart = 1; apart < COUNT; apart *= 2)
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++)
            if ((i & apart) == 0) {
                const float a = x[i], b = x[i + apart];
                x[i] = plus(a, b);
                x[i + apart] = minus(a, b);
            }
}

// Pairs all elements of a bucket. If the team is a block of threads, `exchange` has room for a
// row. All threads of
// a block take part.
template <u32 TEAM, u32 ROWS> DEVICE void pair_all(float (&x)[ROWS][EIGHT], float *exchange)
{
    constexpr u32 COLUMNS = WARP * EIGHT;
    const u32 lane = THREAD % WARP, warp = THREAD / WARP;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        pair<EIGHT>(x[row]);
#pragma unroll
        for (u32 mask = 1; mask < (TEAM < WARP ? TEAM : WARP); mask *= 2)
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) {
                const float other = float_of(lane_xor(bits_of(x[row][i]), mask));
                x[row][i] = lane & mask ? minus(other, x[row][i]) : plus(x[row][i], other);
            }
        if (TEAM > WARP) {
            // Each thread gets some elements of all warps, and pairs these.
            constexpr u32 WARPS_OF_TEAM = TEAM > WARP ? TEAM / WARP : 1;
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) exchange[warp * COLUMNS + i * WARP + lane] = x[row][i];
            block_sync();
            float columns[EIGHT];
            auto place = [&](u32 i) { return i % WARPS_OF_TEAM * COLUMNS + i / WARPS_OF_TEAM * TEAM + THREAD; };
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) columns[i] = exchange[place(i)];
            pair<WARPS_OF_TEAM>(columns);
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) exchange[place(i)] = columns[i];
            block_sync();
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) x[row][i] = exchange[warp * COLUMNS + i * WARP + lane];
            block_sync();
        }
    }
#pragma unroll
    for (u32 apart = 1; apart < ROWS; apart *= 2)
#pragma unroll
        for (u32 row = 0; row < ROWS; row++)
            if ((row & apart) == 0) {
#pragma unroll
                for (u32 i = 0; i < EIGHT; i++) {
                    const float a = x[row][i], b = x[row + apart < ROWS ? row + apart : row][i];
                    x[row][i] = plus(a, b);
                    x[row + apart < ROWS ? row + apart : row][i] = minus(a, b);
                }
            }
}

// The sign of an element of a bucket, over the square root of the number of elements: `factor`.
DEVICE float signed_factor(u32 index, float factor)
{
    return float_of(bits_of(factor) | (mixed(index + 0x9e3779b9, 0) & SIGN_BIT));
}

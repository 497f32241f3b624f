// Codes of eight elements, and their way to and from the bytes of a tile.
//
// Owns the packing of codes, and stores that are coalesced for every number of bits. Does not know what a code means.

// The codes of eight elements, the first in the lowest bits.
template <u32 BITS> struct Codes {
    static constexpr u32 LEVEL = (1 << BITS) - 1;
    // Four codes each.
    u32 low, high;

    // Packs numbers that are OFFSET greater than their codes. One multiplication and addition packs a number, and
    // OFFSET is subtracted once, modulo 2^32.
    template <u32 OFFSET> DEVICE_MEMBER void set(const u32 (&codes)[EIGHT])
    {
        constexpr u32 EXCESS = OFFSET * (1 + (1u << BITS) + (1u << 2 * BITS) + (1u << 3 * BITS));
        low = high = 0;
#pragma unroll
        for (u32 i = 4; i-- > 0;) {
            low = (low << BITS) + codes[i];
            high = (high << BITS) + codes[i + 4];
        }
        low -= EXCESS;
        high -= EXCESS;
    }

    // Sets the codes from `count` on to 0.
    DEVICE_MEMBER void keep(u32 count)
    {
        const u64 kept = count < EIGHT ? ((u64)1 << BITS * count) - 1 : ~(u64)0;
        set_word(word() & kept);
    }

    DEVICE_MEMBER u32 get(u32 index) const { return (index < 4 ? low : high) >> BITS * (index % 4) & LEVEL; }

    DEVICE_MEMBER u64 word() const { return (u64)high << 4 * BITS | low; }

    DEVICE_MEMBER void set_word(u64 word)
    {
        low = (u32)(word & (((u64)1 << 4 * BITS) - 1));
        high = (u32)(word >> 4 * BITS);
    }
};

// Bytes of shared memory in which a block of threads puts codes in order.
template <u32 THREADS> struct Staging {
    u8 bytes[THREADS / WARP][WARP * EIGHT];
};

// Writes the codes of a warp: of each lane the first `bytes` bytes of `word`. They follow each other in memory. `to` is
// the address for the lane's own codes, `before` are the bytes of the lanes before it, and `total` are the bytes of all
// lanes. All lanes of a warp take part.
template <u32 BITS, u32 THREADS>
DEVICE void write_codes(Staging<THREADS> &staging, u8 *to, u64 word, u32 bytes, u32 before, u32 total)
{
    constexpr bool IS_DIRECT = BITS == 1 || BITS == 2 || BITS == 4 || BITS == 8;
    if (IS_DIRECT && is_aligned(to, BITS)) {
        if (bytes == BITS) {
            if (BITS == 1) write_at<u8>(to, (u8)word);
            if (BITS == 2) write_at<u16>(to, (u16)word);
            if (BITS == 4) write_at<u32>(to, (u32)word);
            if (BITS == 8) write_at<u64>(to, word);
        } else {
#pragma unroll 1
            for (u32 i = 0; i < bytes; i++) write_at<u8>(to + i, (u8)(word >> 8 * i));
        }
        // All lanes have the alignment of one.
        return;
    }
    u8 *room = staging.bytes[THREAD / WARP];
#pragma unroll
    for (u32 i = 0; i < BITS; i++)
        if (i < bytes) room[before + i] = (u8)(word >> 8 * i);
    warp_sync();
    u8 *begin = to - before;
    const u32 lane = THREAD % WARP;
    if (is_aligned(begin, 4)) {
        const u32 words = total / 4;
#pragma unroll 1
        for (u32 i = lane; i < words; i += WARP) write_at<u32>(begin + 4 * i, *(const u32 *)(room + 4 * i));
        if (lane < total % 4) write_at<u8>(begin + 4 * words + lane, room[4 * words + lane]);
    } else {
#pragma unroll 1
        for (u32 i = lane; i < total; i += WARP) write_at<u8>(begin + i, room[i]);
    }
    warp_sync();
}

// Reads the codes of eight elements, of which the memory has the first `bytes` bytes; the others count as zero.
template <u32 BITS> DEVICE u64 read_codes(const u8 *from, u32 bytes)
{
    if (bytes == BITS) {
        if (BITS == 8 && is_aligned(from, 8)) return read_at<u64>(from);
        if (BITS == 4 && is_aligned(from, 4)) return read_at<u32>(from);
        if (BITS == 2 && is_aligned(from, 2)) return read_at<u16>(from);
        if (BITS == 6 && is_aligned(from, 2))
            return read_at<u16>(from) | (u32)read_at<u16>(from + 2) << 16 | (u64)read_at<u16>(from + 4) << 32;
    }
    u64 word = 0;
#pragma unroll
    for (u32 i = 0; i < BITS; i++)
        if (i < bytes) word |= (u64)read_at<u8>(from + i) << 8 * i;
    return word;
}

// Bytes of the codes of `count` elements.
template <u32 BITS> DEVICE u32 code_bytes(u32 count) { return ceil_div(count * BITS, 8); }

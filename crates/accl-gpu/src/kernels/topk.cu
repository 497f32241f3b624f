// The elements of greatest magnitude of each bucket, by index and value; accl-kernels' `codec/top_k.rs` has the format.
//
// Owns the selection. A bucket belongs to a team, as in `uniform.cu`. The least magnitude that is kept is found bit by
// bit: each step counts the elements that are not below a candidate.

constexpr u32 TENSOR = ACCL_TENSOR;
constexpr u32 META = ACCL_META;
constexpr u32 BITS = ACCL_BITS;
constexpr u32 BUCKET = ACCL_BUCKET;
constexpr u32 THREADS = ACCL_THREADS;
constexpr u32 TEAM = ACCL_TEAM;
constexpr u32 ROWS = ACCL_ROWS;
// Elements that a block encodes, and that it decodes.
constexpr u32 PART = ACCL_PART;
constexpr u32 DECODE_PART = ACCL_DECODE_PART;
constexpr u32 DECODE_THREADS = ACCL_DECODE_THREADS;

constexpr bool IS_WIDE = TEAM > WARP;
constexpr u32 TEAMS = IS_WIDE ? 1 : THREADS / TEAM;
constexpr u32 EIGHTS = BUCKET / EIGHT;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 INDEX_BYTES = 2;
constexpr u32 META_BYTES = bytes_of(META);

static_assert(PART == TEAMS * BUCKET && DECODE_PART % BUCKET == 0, "a block has whole buckets");
static_assert(EIGHTS <= TEAM * ROWS && (!IS_WIDE || TEAM == THREADS), "a team has a bucket");

// Number of elements that are kept of `elements`.
DEVICE constexpr u32 kept_of(u32 elements) { return (elements + (1 << BITS) - 1) >> BITS; }

struct Layout {
    u32 indices_at, indices_end, end;

    DEVICE_MEMBER explicit Layout(u32 elements)
    {
        const u32 kept = elements / BUCKET * kept_of(BUCKET) + kept_of(elements % BUCKET);
        indices_at = kept * META_BYTES;
        indices_end = indices_at + kept * INDEX_BYTES;
        end = round_up(indices_end, 8);
    }
};

struct Room {
    u32 counts[2][WARPS];
    u32 sums[ROWS][WARPS];
};

// Sums up a number of all threads of a team. `turn` alternates from call to call.
DEVICE u32 sum_of_team(Room &room, u32 value, u32 turn)
{
    value = team_sum<IS_WIDE ? WARP : TEAM>(value);
    if (!IS_WIDE) return value;
    if (THREAD % WARP == 0) room.counts[turn % 2][THREAD / WARP] = value;
    block_sync();
    value = 0;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) value += room.counts[turn % 2][warp];
    return value;
}

// The greatest of all threads of a team.
DEVICE u32 greatest_of_team(Room &room, u32 value)
{
    value = (u32)team_greatest<IS_WIDE ? WARP : TEAM>((i32)value);
    if (!IS_WIDE) return value;
    if (THREAD % WARP == 0) room.counts[0][THREAD / WARP] = value;
    block_sync();
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) value = greatest(value, room.counts[0][warp]);
    block_sync();
    return value;
}

template <class Source> DEVICE void encode(const Args &args, Room &room, const Work &work, const Source &source)
{
    const Layout layout(work.elements);
    const u32 lane = IS_WIDE ? THREAD : THREAD % TEAM;
    const u32 bucket = work.part * TEAMS + (IS_WIDE ? 0 : THREAD / TEAM);
    const u32 begin = bucket * BUCKET;
    const u32 elements = begin < work.elements ? least(work.elements - begin, BUCKET) : 0;
    const u32 kept = kept_of(elements);

    float x[ROWS][EIGHT] = {};
    u32 counts[ROWS];
    u32 most = 0;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u32 at = (row * TEAM + lane) * EIGHT;
        counts[row] = at < elements ? least(elements - at, EIGHT) : 0;
        if (counts[row] > 0) source.read(x[row], begin + at, counts[row]);
        // Missing elements are the last of equals, and no other number is less.
        if (counts[row] < EIGHT) {
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) x[row][i] = i < counts[row] ? x[row][i] : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) most = greatest(most, bits_of(x[row][i]) & ~SIGN_BIT);
    }
    most = greatest_of_team(room, most);
    const bool was_finite = most < INFINITY_BITS;
    // The greatest magnitude is kept, and the metadata can hold the others if it can hold this one.
    const bool fits = was_finite && is_finite(widen<META>(narrow<META>(float_of(most))));

    // The least magnitude that is kept. If it is found early, no magnitude equals it but those that are kept.
    u32 threshold = 0;
    bool is_found = elements == 0 || !fits;
    for (u32 bit = 31; bit-- > 0;) {
        if (IS_WIDE ? is_found : warp_ballot(!is_found) == 0) break;
        const u32 candidate = threshold | 1u << bit;
        u32 found = 0;
#pragma unroll
        for (u32 row = 0; row < ROWS; row++)
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) found += (bits_of(x[row][i]) & ~SIGN_BIT) >= candidate;
        found = sum_of_team(room, found, bit);
        if (!is_found && found >= kept) threshold = candidate;
        is_found |= found == kept;
    }

    // Numbers of elements above the threshold, in the upper half, and of elements that equal it. They are added up over
    // the lanes of a row, and then over the rows.
    u32 before[ROWS];
    u32 above = 0;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        u32 own = 0;
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            const u32 size = bits_of(x[row][i]) & ~SIGN_BIT;
            own += size > threshold ? 1 << 16 : size == threshold ? 1 : 0;
        }
        u32 all = own;
        const u32 place = THREAD % (IS_WIDE ? WARP : TEAM);
#pragma unroll
        for (u32 apart = 1; apart < (IS_WIDE ? WARP : TEAM); apart *= 2) {
            const u32 other = lane_from(all, (THREAD - apart) % WARP);
            if (place >= apart) all += other;
        }
        before[row] = above + all - own;
        if (IS_WIDE) {
            if (place == WARP - 1) room.sums[row][THREAD / WARP] = all;
        } else {
            above += lane_from(all, (THREAD - place + TEAM - 1) % WARP);
        }
    }
    if (IS_WIDE) {
        block_sync();
#pragma unroll
        for (u32 row = 0; row < ROWS; row++)
#pragma unroll
            for (u32 warp = 0; warp < WARPS; warp++) {
                if (warp == THREAD / WARP) before[row] += above;
                above += room.sums[row][warp];
            }
    }
    const u32 ties = kept - (above >> 16);

    const u32 first = bucket * kept_of(BUCKET);
    u8 *values = work.code + first * META_BYTES, *indices = work.code + layout.indices_at + first * INDEX_BYTES;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        if (counts[row] == 0) continue;
        const u32 at = (row * TEAM + lane) * EIGHT;
        u32 greater_before = before[row] >> 16, equal_before = before[row] & 0xffff;
        float decoded[EIGHT];
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            const u32 size = bits_of(x[row][i]) & ~SIGN_BIT;
            const bool is_equal = size == threshold;
            const u32 place = greater_before + least(equal_before, ties);
            const bool is_kept = fits && i < counts[row] && (size > threshold || (is_equal && equal_before < ties));
            const u32 bits = narrow<META>(x[row][i]);
            if (is_kept) {
                write_bits<META>(values + place * META_BYTES, bits);
                write_at<u16>(indices + place * INDEX_BYTES, (u16)(at + i));
            }
            decoded[i] = is_kept ? widen<META>(bits) : fits ? 0.0f : float_of(NAN_BITS);
            greater_before += size > threshold;
            equal_before += is_equal;
        }
        source.take(begin + at, x[row], decoded, counts[row]);
    }
    if (!fits && elements > 0) {
        if (lane == 0 && was_finite) count_too_large(args);
        if (lane == 0 && !was_finite) count_not_finite(args);
        for (u32 place = lane; place < kept; place += TEAM) {
            write_number<META>(values + place * META_BYTES, float_of(NAN_BITS));
            write_at<u16>(indices + place * INDEX_BYTES, (u16)place);
        }
    }
    if (work.is_last && THREAD < layout.end - layout.indices_end)
        write_at<u8>(work.code + layout.indices_end + THREAD, 0);
}

// Calls `each` with the index and the value of every kept element of a bucket of `elements` elements. An index that is
// not above all others before it, or that is beyond the bucket, is skipped. Returns false if the bucket is NaN; then
// nothing was called. All lanes of a warp take part.
template <class Each> DEVICE bool each_kept(const Work &work, u32 bucket, u32 elements, Each each)
{
    const Layout layout(work.elements);
    const u32 first = bucket * kept_of(BUCKET), kept = kept_of(elements), lane = THREAD % WARP;
    const u8 *values = work.code + first * META_BYTES, *indices = work.code + layout.indices_at + first * INDEX_BYTES;
    if (is_nan(read_number<META>(values))) return false;
    // One more than the greatest index before.
    u32 least_index = 0;
    for (u32 start = 0; start < kept; start += WARP) {
        const u32 place = start + lane;
        const u32 index = place < kept ? read_at<u16>(indices + place * INDEX_BYTES) : elements;
        // The greatest of this lane and those before it, of indices that are in the bucket.
        u32 next = index < elements ? index + 1 : 0;
        const u32 own = next;
#pragma unroll
        for (u32 apart = 1; apart < WARP; apart *= 2) {
            const u32 other = lane_from(next, (lane - apart) % WARP);
            if (lane >= apart) next = greatest(next, other);
        }
        const u32 previous = lane_from(next, (lane - 1) % WARP);
        const u32 bound = lane == 0 ? least_index : greatest(least_index, previous);
        if (own > bound) each(index, canonical(read_number<META>(values + place * META_BYTES)));
        least_index = greatest(least_index, lane_from(next, WARP - 1));
    }
    return true;
}

// Calls `each` with the index and the number of elements of every bucket of this block. A warp has a bucket.
template <class Each> DEVICE void each_bucket(const Work &work, Each each)
{
    for (u32 at = THREAD / WARP * BUCKET; at < DECODE_PART; at += DECODE_THREADS / WARP * BUCKET) {
        const u32 begin = work.part * DECODE_PART + at;
        if (begin < work.elements) each(begin / BUCKET, begin, least(work.elements - begin, BUCKET));
    }
}

struct Decoded {
    float values[DECODE_PART];
};

template <u32 TO> DEVICE void decode_to(const Args &args, Decoded &room)
{
    const Work work = work_of_block<DECODE_PART>(args);
    const u32 part_at = work.part * DECODE_PART;
    for (u32 at = THREAD; at < DECODE_PART; at += DECODE_THREADS) room.values[at] = 0.0f;
    block_sync();
    each_bucket(work, [&](u32 bucket, u32 begin, u32 elements) {
        float *values = room.values + (begin - part_at);
        const bool is_sound = each_kept(work, bucket, elements, [&](u32 index, float value) { values[index] = value; });
        for (u32 at = THREAD % WARP; at < elements && !is_sound; at += WARP) values[at] = float_of(NAN_BITS);
    });
    block_sync();
    for (u32 at = THREAD * EIGHT; at < DECODE_PART && part_at + at < work.elements; at += DECODE_THREADS * EIGHT) {
        float x[EIGHT];
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) x[i] = room.values[at + i];
        write_eight<TO, TO_LARGEST>(work.span.values + (work.start + part_at + at) * bytes_of(TO), x,
                                    least(work.elements - part_at - at, EIGHT));
    }
}

#if ACCL_KERNELS & ACCL_DECODE
KERNEL(accl_decode, DECODE_THREADS)
{
    SHARED Decoded room;
    decode_to<TENSOR>(args, room);
}
#endif

#if ACCL_KERNELS & ACCL_DECODE_SUMS
KERNEL(accl_decode_sums, DECODE_THREADS)
{
    SHARED Decoded room;
    decode_to<F32>(args, room);
}
#endif

#if ACCL_KERNELS & ACCL_DECODE_ADD
KERNEL(accl_decode_add, DECODE_THREADS)
{
    const Work work = work_of_block<DECODE_PART>(args);
    each_bucket(work, [&](u32 bucket, u32 begin, u32 elements) {
        u8 *sums = work.span.sums + (work.start + begin) * 4;
        const bool is_sound = each_kept(work, bucket, elements, [&](u32 index, float value) {
            write_number<F32>(sums + index * 4, sum_of(read_number<F32>(sums + index * 4), value));
        });
        for (u32 at = THREAD % WARP; at < elements && !is_sound; at += WARP)
            write_number<F32>(sums + at * 4, float_of(NAN_BITS));
    });
}
#endif

// Codecs whose levels lie evenly in each bucket: maxmin, absmax and hadamard, which is maxmin of rotated buckets;
// accl-kernels' `codec/uniform.rs` and `codec/hadamard.rs` have the format.
//
// Owns metadata and levels. A bucket belongs to a team: a power of two of lanes of one warp, or all threads of a block.
// A lane has ROWS groups of eight elements, which stay in registers.

constexpr u32 TENSOR = ACCL_TENSOR;
constexpr u32 META = ACCL_META;
constexpr u32 ROUNDING = ACCL_ROUNDING;
constexpr u32 BITS = ACCL_BITS;
constexpr u32 BUCKET = ACCL_BUCKET;
constexpr u32 THREADS = ACCL_THREADS;
constexpr u32 TEAM = ACCL_TEAM;
constexpr u32 ROWS = ACCL_ROWS;
// Elements that a block encodes.
constexpr u32 PART = ACCL_PART;
constexpr bool SKIPS_INCOMPLETE = ACCL_SKIP_INCOMPLETE;
constexpr bool IS_SYMMETRIC = ACCL_SYMMETRIC;
constexpr bool ROTATES = ACCL_ROTATES;

constexpr bool IS_WIDE = TEAM > WARP;
constexpr u32 TEAMS = IS_WIDE ? 1 : THREADS / TEAM;
constexpr u32 EIGHTS = BUCKET / EIGHT;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 META_BYTES = (IS_SYMMETRIC ? 1 : 2) * bytes_of(META);

// Elements of a rotated tile that are encoded together; their codes follow each other.
constexpr u32 SLICE = BUCKET > 4096 ? BUCKET : 4096;

static_assert(!ROTATES || SLICE % PART == 0, "a block encodes a part of one slice");
static_assert(!ROTATES || !IS_WIDE || EIGHT % WARPS == 0, "the warps of a rotated bucket divide a group of eight");
static_assert(PART == TEAMS * BUCKET, "a block has as many buckets as teams");
static_assert(EIGHTS <= TEAM * ROWS && (!IS_WIDE || TEAM == THREADS), "a team has a bucket");

// The greatest level on one side of zero, and the greatest level.
constexpr float REACH = (float)((1u << (BITS - 1)) - 1);
constexpr float TOP = IS_SYMMETRIC ? 2.0f * REACH : (float)((1u << BITS) - 1);

struct Layout {
    u32 coded; // Elements in buckets.
    u32 codes_at, codes_end, tail_at, tail_end, end;

    DEVICE_MEMBER explicit Layout(u32 elements)
    {
        coded = SKIPS_INCOMPLETE ? elements - elements % BUCKET : elements;
        codes_at = META_BYTES * ceil_div(coded, BUCKET);
        codes_end = codes_at + code_bytes<BITS>(coded);
        tail_at = codes_at + round_up(codes_end - codes_at, 8);
        tail_end = tail_at + (elements - coded) * bytes_of(TENSOR);
        end = round_up(tail_end, 8);
    }
};

// The slice of this block's part: a part of a rotated tile, or the whole of another tile.
struct Slice {
    u8 *code;
    u32 start;    // Index of the first element in the tile.
    u32 elements;
    u32 part;     // Index of the block's part in the slice.
    bool is_last; // Whether it is the slice's last part.

    DEVICE_MEMBER explicit Slice(const Work &work)
        : code(work.code), start(0), elements(work.elements), part(work.part), is_last(work.is_last)
    {
        if (!ROTATES) return;
        constexpr u32 PARTS = ROTATES ? SLICE / PART : 1;
        code += part / PARTS * Layout(SLICE).end;
        start = part / PARTS * SLICE;
        elements = least(work.elements - start, SLICE);
        part %= PARTS;
        is_last = part + 1 == ceil_div(elements, PART);
    }
};

constexpr u32 IS_FINE = 0;
constexpr u32 IS_NOT_FINITE = 1;
constexpr u32 IS_TOO_LARGE = 2;

// Metadata of a bucket, and the grid for its values or for their halves.
struct Placed {
    float unit, min;
    float grid_min, inverse;
    bool halves;
    u32 verdict;
};

// Bits of the values of a bucket, compared as signed and as unsigned numbers. Among floats of one sign, greater bits mean
// a greater magnitude, and the bits of NaN and infinities are the greatest.
struct Extremes {
    i32 signed_most;
    u32 unsigned_most, unsigned_least;

    DEVICE_MEMBER void clear()
    {
        signed_most = (i32)SIGN_BIT;
        unsigned_most = 0;
        unsigned_least = 0xffffffff;
    }

    DEVICE_MEMBER void take(float value)
    {
        const u32 bits = bits_of(value);
        signed_most = greatest(signed_most, (i32)bits);
        unsigned_most = greatest(unsigned_most, bits);
        unsigned_least = ::least(unsigned_least, bits);
    }

    DEVICE_MEMBER void take(const Extremes &other)
    {
        signed_most = greatest(signed_most, other.signed_most);
        unsigned_most = greatest(unsigned_most, other.unsigned_most);
        unsigned_least = ::least(unsigned_least, other.unsigned_least);
    }

    // The greatest as unsigned belongs to the least negative value, the greatest as signed to the greatest value that is
    // not negative. If all values have one sign, the least as unsigned is the other end.
    DEVICE_MEMBER float least() const
    {
        return float_of((i32)unsigned_most < 0 ? unsigned_most : unsigned_least);
    }

    DEVICE_MEMBER float most() const { return float_of(signed_most < 0 ? unsigned_least : (u32)signed_most); }
};

DEVICE bool has_finite_levels(float unit, float min)
{
    if (!is_finite(min)) return false;
    // The highest level is found in float64. Unless it is near the end of float32's range, float32 gives the verdict.
    if (magnitude(fused(unit, TOP, min)) < float_of((127 + 127) << 23)) return true;
    return is_finite(narrowed(plus(times((double)unit, (double)TOP), (double)min)));
}

DEVICE float min_of(float unit) { return minus(0.0f, times(unit, REACH)); }

DEVICE Placed placed(const Extremes &extremes)
{
    const float lowest = extremes.least(), highest = extremes.most();
    Placed p = {0.0f, 0.0f, 0.0f, 0.0f, false, IS_FINE};
    if (!is_finite(lowest) || !is_finite(highest)) {
        p.unit = p.min = float_of(NAN_BITS);
        p.verdict = IS_NOT_FINITE;
        return p;
    }
    if (IS_SYMMETRIC) {
        const float most = greater(highest, -lowest);
        if (most == 0.0f) return p;
        // Rounds up, so that products with levels are exact.
        const float unit = float_of((bits_of(over(most, REACH)) + 0x7f) & ~0x7fu);
        p.unit = greater(toward_up<META>(unit), smallest_normal<META>());
        p.halves = !is_finite(times(2.0f, most));
        p.min = min_of(p.unit);
    } else {
        // Adds 0 so that there is no -0.
        p.min = plus(toward_down<META>(lowest), 0.0f);
        const float width = minus(highest, p.min);
        p.grid_min = p.min;
        if (width == 0.0f) return p;
        p.halves = !is_finite(width);
        const float unit = p.halves ? minus(over(highest, TOP), over(p.min, TOP)) : over(width, TOP);
        p.unit = greater(toward_up<META>(unit), smallest_normal<META>());
    }
    if (!has_finite_levels(p.unit, p.min)) {
        p.unit = p.min = float_of(NAN_BITS);
        p.verdict = IS_TOO_LARGE;
        return p;
    }
    const float by = p.halves ? 0.5f : 1.0f;
    p.grid_min = times(p.min, by);
    p.inverse = inverse_of(times(p.unit, by));
    return p;
}

DEVICE float scaled(float x, const Placed &p) { return lesser(times(minus(x, p.grid_min), p.inverse), TOP); }

// Finds the levels of eight values. `random` are the random bits of these elements.
DEVICE Codes<BITS> codes_of(const float (&x)[EIGHT], const Placed &p, const u32 (&random)[2])
{
    u32 numbers[EIGHT];
    Codes<BITS> codes = {0, 0};
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) {
        const float s = scaled(p.halves ? times(x[i], 0.5f) : x[i], p);
        if (ROUNDING == NEAREST) numbers[i] = bits_of(plus(s, ROUNDS));
        else numbers[i] = (bits_of(fused(s, 256.0f, ROUNDS)) + (random[i / 4] >> 8 * (i % 4) & 0xff)) >> 8;
    }
    constexpr u32 OFFSET = ROUNDING == NEAREST ? ROUNDS_BITS : ROUNDS_BITS / 256;
    codes.template set<OFFSET>(numbers);
    return codes;
}

// Writes the values of codes.
DEVICE void values_of(float (&values)[EIGHT], const Codes<BITS> &codes, float unit, float min)
{
    const bool is_plain = is_finite(unit) && is_finite(min);
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) {
        const float value = fused(unit, small_number(codes.get(i)), min);
        values[i] = is_plain ? value : canonical(value);
    }
}

struct Room {
    Staging<THREADS> staging;
    Strata strata;
    Extremes extremes[WARPS];
    float exchange[ROTATES && IS_WIDE ? THREADS * EIGHT : 1];
};

// The limit of the magnitude of rotated values: 2^112.
DEVICE float rotated_limit() { return float_of((127 + 112) << 23); }

DEVICE float bucket_factor() { return float_of(ACCL_FACTOR_BITS); }

// Rotates a bucket. All threads of a block take part.
DEVICE void rotate(float (&x)[ROWS][EIGHT], Room &room, u32 lane)
{
#pragma unroll
    for (u32 row = 0; row < ROWS; row++)
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++)
            x[row][i] = times(x[row][i], signed_factor((row * TEAM + lane) * EIGHT + i, bucket_factor()));
    pair_all<TEAM, ROWS>(x, room.exchange);
}

DEVICE void rotate_back(float (&x)[ROWS][EIGHT], Room &room, u32 lane)
{
    pair_all<TEAM, ROWS>(x, room.exchange);
#pragma unroll
    for (u32 row = 0; row < ROWS; row++)
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++)
            x[row][i] = canonical(times(x[row][i], signed_factor((row * TEAM + lane) * EIGHT + i, bucket_factor())));
}

// Joins the extremes of a team. All threads of a block take part.
DEVICE void join(Room &room, Extremes &extremes)
{
    // With the highest bit flipped, unsigned numbers have the same order as signed numbers.
    constexpr u32 LANES = IS_WIDE ? WARP : TEAM;
    extremes.signed_most = team_greatest<LANES>(extremes.signed_most);
    extremes.unsigned_most = (u32)team_greatest<LANES>((i32)(extremes.unsigned_most ^ SIGN_BIT)) ^ SIGN_BIT;
    extremes.unsigned_least = (u32)team_least<LANES>((i32)(extremes.unsigned_least ^ SIGN_BIT)) ^ SIGN_BIT;
    if (!IS_WIDE) return;
    room.extremes[THREAD / WARP] = extremes;
    block_sync();
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) extremes.take(room.extremes[warp]);
    block_sync();
}

// Encodes this block's part of a tile.
template <class Source> DEVICE void encode(const Args &args, Room &room, const Work &work, const Source &source)
{
    const Slice slice(work);
    const Layout layout(slice.elements);
    const u64 first = work.span.first + work.start + slice.start;
    const u32 part_at = slice.part * PART;
    const bool spreads = ROUNDING == CORRELATED && has_strata(work.span);
    if (spreads) find_strata(room.strata, work.span, first + part_at);
    const u32 lane = IS_WIDE ? THREAD : THREAD % TEAM;
    const u32 bucket = slice.part * TEAMS + (IS_WIDE ? 0 : THREAD / TEAM);
    const u32 begin = bucket * BUCKET;
    const bool is_active = begin < layout.coded;
    const bool is_rotated = ROTATES && begin + BUCKET <= layout.coded;

    float x[ROWS][EIGHT] = {};
    u32 counts[ROWS];
    Extremes extremes;
    // Replaces rotated elements by those that were read.
    auto read_again = [&] {
#pragma unroll
        for (u32 row = 0; row < ROWS; row++)
            if (counts[row] > 0)
                source.template read<RARELY>(x[row], slice.start + begin + (row * TEAM + lane) * EIGHT, counts[row]);
    };
    auto find_range = [&] {
        extremes.clear();
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            if (counts[row] == 0) continue;
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) extremes.take(x[row][i]);
        }
        join(room, extremes);
    };
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u32 eight = row * TEAM + lane, at = begin + eight * EIGHT;
        counts[row] = eight < EIGHTS && at < layout.coded ? least(layout.coded - at, EIGHT) : 0;
        if (counts[row] > 0) source.read(x[row], slice.start + at, counts[row]);
    }
    if (ROTATES) {
        rotate(x, room, lane);
        if (!is_rotated) read_again();
    }
    find_range();
    Placed p = placed(extremes);
    if (ROTATES) {
        const float limit = rotated_limit();
        const bool is_beyond = extremes.most() >= limit || extremes.least() <= -limit;
        const bool is_lost = is_rotated && (p.verdict == IS_NOT_FINITE || is_beyond);
        // The other teams of a warp take part in the search for what was not finite. A wide team has one verdict.
        if (IS_WIDE ? is_lost : warp_ballot(is_lost) != 0) {
            if (is_lost) read_again();
            find_range();
            if (is_lost) {
                p.verdict = placed(extremes).verdict == IS_NOT_FINITE ? IS_NOT_FINITE : IS_TOO_LARGE;
                p.unit = p.min = float_of(NAN_BITS);
            }
        }
    }
    if (is_active && lane == 0) {
        u8 *meta = slice.code + bucket * META_BYTES;
        const u32 unit = narrow<META>(p.unit), min = narrow<META>(p.min);
        if (IS_SYMMETRIC) write_bits<META>(meta, unit);
        else if (META == F32) write_at<u64>(meta, (u64)min << 32 | unit);
        else write_at<u32>(meta, min << 16 | unit);
        if (p.verdict == IS_NOT_FINITE) count_not_finite(args);
        if (p.verdict == IS_TOO_LARGE) count_too_large(args);
    }

#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u32 eight = row * TEAM + lane, at = begin + eight * EIGHT, count = counts[row];
        Codes<BITS> codes = {0, 0};
        if (count > 0) {
            u32 random[2] = {0, 0};
            if (ROUNDING != NEAREST) random_words(random, work.span.own, first + at);
            if (spreads) spread(random, room.strata, work.span, first + part_at, first + at);
            if (p.verdict == IS_FINE) codes = codes_of(x[row], p, random);
            if (count < EIGHT) codes.keep(count);
            if (Source::WANTS_DECODED) {
                float decoded[EIGHT];
                values_of(decoded, codes, p.unit, p.min);
                if (!ROTATES) source.take(slice.start + at, x[row], decoded, count);
                else if (!is_rotated) source.template take<TO_LARGEST>(slice.start + at, decoded, count);
#pragma unroll
                for (u32 i = 0; i < EIGHT; i++) x[row][i] = decoded[i];
            }
        }
        // The groups of eight of a warp follow each other.
        const u32 warp_eight = IS_WIDE || TEAM == WARP ? row * TEAM + lane / WARP * WARP : 0;
        const u32 before = IS_WIDE || TEAM == WARP ? lane % WARP : THREAD % WARP / TEAM * EIGHTS + lane;
        const u32 first_eight = (bucket - (IS_WIDE ? 0 : THREAD % WARP / TEAM)) * EIGHTS + warp_eight;
        const u32 most = IS_WIDE || TEAM == WARP ? (warp_eight < EIGHTS ? least(EIGHTS - warp_eight, WARP) : 0)
                                                 : WARP / TEAM * EIGHTS;
        const u32 all_bytes = layout.codes_end - layout.codes_at;
        const u32 total = first_eight * BITS < all_bytes ? least(most * BITS, all_bytes - first_eight * BITS) : 0;
        u8 *to = slice.code + layout.codes_at + (first_eight + before) * BITS;
        write_codes<BITS>(room.staging, to, codes.word(), code_bytes<BITS>(count), before * BITS, total);
    }
    if (ROTATES && Source::WANTS_DECODED) {
        rotate_back(x, room, lane);
#pragma unroll
        for (u32 row = 0; row < ROWS; row++)
            if (is_rotated && counts[row] > 0)
                source.template take<TO_LARGEST>(slice.start + begin + (row * TEAM + lane) * EIGHT, x[row],
                                                 counts[row]);
    }

    if (!slice.is_last) return;
    if (THREAD < layout.tail_at - layout.codes_end) write_at<u8>(slice.code + layout.codes_end + THREAD, 0);
    if (THREAD < layout.end - layout.tail_end) write_at<u8>(slice.code + layout.tail_end + THREAD, 0);
#pragma unroll 1
    for (u32 at = layout.coded + THREAD; at < slice.elements; at += THREADS) {
        // Elements next to rotated ones go through float32, in which a NaN of 16 bits loses its payload.
        const u32 bits = ROTATES ? narrow<TENSOR>(source.read_one(slice.start + at))
                                 : source.template unencoded<TENSOR>(slice.start + at);
        write_loose<TENSOR>(slice.code + layout.tail_at + (at - layout.coded) * bytes_of(TENSOR), bits);
        source.template take_one<TO_INFINITY>(slice.start + at, widen<TENSOR>(bits));
    }
}

// Reads a tile's code.
struct Reader {
    const u8 *code;
    Layout layout;

    DEVICE_MEMBER Reader(const u8 *code, u32 elements) : code(code), layout(elements) {}
    DEVICE_MEMBER explicit Reader(const Work &work) : Reader(work.code, work.elements) {}

    // Number of elements that are encoded; the others follow unencoded.
    DEVICE_MEMBER u32 coded() const { return layout.coded; }
    DEVICE_MEMBER const u8 *tail() const { return code + layout.tail_at; }

    // Returns an element that was sent unencoded.
    DEVICE_MEMBER float read_one(u32 at) const
    {
        return widen<TENSOR>(read_loose<TENSOR>(tail() + (at - layout.coded) * bytes_of(TENSOR)));
    }

    // Decodes `count` elements from `at` on, a multiple of 8.
    DEVICE_MEMBER void read(float (&values)[EIGHT], u32 at, u32 count) const
    {
        const u8 *meta = code + at / BUCKET * META_BYTES;
        float unit, min;
        if (IS_SYMMETRIC) {
            unit = read_number<META>(meta);
            min = min_of(unit);
        } else if (META == F32) {
            const u64 both = read_at<u64>(meta);
            unit = float_of((u32)both);
            min = float_of((u32)(both >> 32));
        } else {
            const u32 both = read_at<u32>(meta);
            unit = widen<META>(both & 0xffff);
            min = widen<META>(both >> 16);
        }
        Codes<BITS> codes;
        codes.set_word(read_codes<BITS>(code + layout.codes_at + at / EIGHT * BITS, code_bytes<BITS>(count)));
        values_of(values, codes, unit, min);
    }
};

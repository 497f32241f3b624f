// Signs, and the mean magnitude of each bucket; accl-kernels' `codec/sign.rs` has the format.
//
// Owns the mean, whose sixteen partial sums in float64 are sixteen lanes: a bucket belongs to them. Each lane reads one
// element of every row of sixteen.

constexpr u32 TENSOR = ACCL_TENSOR;
constexpr u32 META = ACCL_META;
constexpr u32 BUCKET = ACCL_BUCKET;
constexpr u32 THREADS = ACCL_THREADS;
// Elements that a block encodes.
constexpr u32 PART = ACCL_PART;

constexpr u32 LANES = 16;
constexpr u32 TEAMS = THREADS / LANES;
// Buckets that a team encodes, one after the other.
constexpr u32 PASSES = PART / (TEAMS * BUCKET);
// Rows whose codes fill a byte of each lane.
constexpr u32 ROWS = 8;

static_assert(PART == PASSES * TEAMS * BUCKET, "every team has as many buckets");

struct Layout {
    u32 codes_at, codes_end, end;

    DEVICE_MEMBER explicit Layout(u32 elements)
    {
        codes_at = bytes_of(META) * ceil_div(elements, BUCKET);
        codes_end = codes_at + ceil_div(elements, 8);
        end = round_up(codes_end, 8);
    }
};

// Shared memory is not needed.
struct Room {};

DEVICE double lane_xor_double(double value, u32 mask)
{
    const u64 bits = bits_of(value);
    return double_of((u64)lane_xor((u32)(bits >> 32), mask) << 32 | lane_xor((u32)bits, mask));
}

DEVICE float signed_value(float mean, bool is_negative) { return float_of(bits_of(mean) ^ (is_negative ? SIGN_BIT : 0)); }

template <class Source> DEVICE void encode_bucket(const Args &args, const Work &work, const Source &source, u32 bucket)
{
    const Layout layout(work.elements);
    const u32 lane = THREAD % LANES, begin = bucket * BUCKET;
    const u32 count = begin < work.elements ? least(work.elements - begin, BUCKET) : 0;
    const u32 bytes = ceil_div(count, 8);
    u8 *codes = work.code + layout.codes_at + begin / 8;
    double sum = 0.0;
    // All lanes of a warp go through as many rows.
    for (u32 chunk = 0; chunk < BUCKET; chunk += ROWS * LANES) {
        float x[ROWS];
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const u32 at = chunk + row * LANES + lane;
            x[row] = at < count ? source.read_one(begin + at) : 0.0f;
        }
        u32 mine = 0;
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            // A missing element adds nothing.
            sum = plus(sum, (double)magnitude(x[row]));
            const u32 signs = warp_ballot(x[row] < 0.0f) >> (THREAD % WARP / LANES * LANES);
            if (lane / 2 == row) mine = signs >> 8 * (lane % 2) & 0xff;
        }
        if (chunk / 8 + lane < bytes) write_at<u8>(codes + chunk / 8 + lane, (u8)mine);
    }
#pragma unroll
    for (u32 half = LANES / 2; half > 0; half /= 2) sum = plus(sum, lane_xor_double(sum, half));
    if (count == 0) return;

    // A sum of magnitudes of float32 is finite in float64, unless one of them is not.
    const bool was_finite = sum < 1e300;
    const u32 meta = narrow<META>(narrowed(over(sum, (double)count)));
    float mean = widen<META>(meta);
    const bool fits = was_finite && is_finite(mean);
    if (!fits) mean = float_of(NAN_BITS);
    if (lane == 0) {
        write_bits<META>(work.code + bucket * bytes_of(META), fits ? meta : narrow<META>(mean));
        if (!was_finite) count_not_finite(args);
        else if (!fits) count_too_large(args);
    }
    if (!fits)
        for (u32 at = lane; at < bytes; at += LANES) write_at<u8>(codes + at, 0);
    if (Source::WANTS_DECODED)
        for (u32 at = lane; at < count; at += LANES) {
            const float x = source.read_one(begin + at);
            // The codes of a bucket that is NaN are zeros.
            source.template take_one<TO_LARGEST>(begin + at, signed_value(mean, fits && x < 0.0f));
        }
}

template <class Source> DEVICE void encode(const Args &args, Room &, const Work &work, const Source &source)
{
    for (u32 pass = 0; pass < PASSES; pass++)
        encode_bucket(args, work, source, (work.part * PASSES + pass) * TEAMS + THREAD / LANES);
    const Layout layout(work.elements);
    if (work.is_last && THREAD < layout.end - layout.codes_end) write_at<u8>(work.code + layout.codes_end + THREAD, 0);
}

struct Reader {
    const u8 *code;
    u32 elements;
    Layout layout;

    DEVICE_MEMBER Reader(const u8 *code, u32 elements) : code(code), elements(elements), layout(elements) {}
    DEVICE_MEMBER explicit Reader(const Work &work) : Reader(work.code, work.elements) {}

    DEVICE_MEMBER u32 coded() const { return elements; }
    // No element is sent unencoded.
    DEVICE_MEMBER const u8 *tail() const { return code; }

    DEVICE_MEMBER float mean_of(u32 at) const
    {
        return canonical(read_number<META>(code + at / BUCKET * bytes_of(META)));
    }

    DEVICE_MEMBER float read_one(u32 at) const
    {
        return signed_value(mean_of(at), read_at<u8>(code + layout.codes_at + at / 8) >> at % 8 & 1);
    }

    DEVICE_MEMBER void read(float (&values)[EIGHT], u32 at, u32) const
    {
        const float mean = mean_of(at);
        const u32 signs = read_at<u8>(code + layout.codes_at + at / 8);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) values[i] = signed_value(mean, signs >> i & 1);
    }
};

// Reductions of several operands, element by element, as accl-kernels' `reduce` does them.
//
// Owns the kernel of a module of reductions, its arguments and the arithmetic of all types. Elements of operands are
// combined in the order of the operands. Elements of 16-bit types are combined in float32, and rounded once.
//
// A lane is a number that is combined by itself, such as a part of a complex number. Bits are combined in lanes of 32 bits,
// but counted in bytes.

// Types by their numbers in ACCL_ELEMENT, in addition to the types in `numbers.cuh`. Signed integers have odd numbers.
constexpr u32 F64 = 3;
constexpr u32 BOOL = 4;
constexpr u32 UNSIGNED8 = 6;
constexpr u32 SIGNED8 = 7;
constexpr u32 UNSIGNED16 = 8;
constexpr u32 SIGNED16 = 9;
constexpr u32 UNSIGNED32 = 10;
constexpr u32 SIGNED32 = 11;
constexpr u32 UNSIGNED64 = 12;
constexpr u32 SIGNED64 = 13;

// Operators by their numbers in ACCL_OPERATOR.
constexpr u32 SUM = 0;
constexpr u32 PRODUCT = 1;
constexpr u32 LEAST = 2;
constexpr u32 GREATEST = 3;
constexpr u32 AND = 4;
constexpr u32 OR = 5;
constexpr u32 XOR = 6;

constexpr u32 ELEMENT = ACCL_ELEMENT;
constexpr u32 OPERATOR = ACCL_OPERATOR;
// Whether results are divided where the arguments have a divisor.
constexpr bool DIVIDES = ACCL_DIVIDES;
// Whether two numbers are one complex number, for products.
constexpr bool IS_COMPLEX = ACCL_COMPLEX;
constexpr u32 THREADS = ACCL_THREADS;

constexpr bool IS_INTEGER = ELEMENT >= UNSIGNED8;
constexpr bool IS_SIGNED = IS_INTEGER && ELEMENT % 2 == 1;
constexpr bool IS_ORDER = OPERATOR == LEAST || OPERATOR == GREATEST;
constexpr bool HAS_BITS = IS_INTEGER && OPERATOR >= AND;

// Bytes of a counted number, and of a lane.
constexpr u32 BYTES = ELEMENT == BOOL || ELEMENT == UNSIGNED8 || ELEMENT == SIGNED8 ? 1
    : ELEMENT == F16 || ELEMENT == BF16 || ELEMENT == UNSIGNED16 || ELEMENT == SIGNED16 ? 2
    : ELEMENT == F32 || ELEMENT == UNSIGNED32 || ELEMENT == SIGNED32 ? 4 : 8;
constexpr u32 LANE_BYTES = HAS_BITS ? 4 : BYTES;
static_assert(!HAS_BITS || BYTES == 1, "bits are counted in bytes");

// Bytes that a thread handles together, and numbers in them.
constexpr u32 VECTOR_BYTES = 16;
constexpr u32 WORDS = VECTOR_BYTES / 4;
constexpr u32 VECTOR = VECTOR_BYTES / BYTES;
constexpr u32 LANES = VECTOR_BYTES / LANE_BYTES;
// Numbers of an element.
constexpr u32 PARTS = IS_COMPLEX ? 2 : 1;
// Vectors of a thread, and numbers that a block handles.
constexpr u32 ROWS = 2;
constexpr u32 STEP = THREADS * VECTOR;
constexpr u32 PART = ROWS * STEP;
static_assert(PART * BYTES == ACCL_PART_BYTES, "a block has another part than in reductions.rs");

struct Args {
    u32 parts;    // Number of parts.
    u32 operands; // Number of operands of each part.
    u32 world;    // Divisor; 0 for none.
    u32 reserved;
    // Of each part: the address of the results, the number of numbers, the number of the first block in the lower half and
    // the bytes of an access in the upper half, and the addresses of the operands.
    u64 words[ACCL_WORDS];
};

static_assert(sizeof(Args) <= 4096, "the arguments exceed the parameters of a kernel");

constexpr u32 HEAD = 3;

// ---- Arithmetic -------------------------------------------------------------------------------------------------

template <bool CHOICE, class A, class B> struct Either { typedef A Type; };
template <class A, class B> struct Either<false, A, B> { typedef B Type; };

// The bits of a lane, and the number that is combined. Sums and products of signed integers are computed modulo a power of
// two, like unsigned ones.
typedef Either<LANE_BYTES == 8, u64, u32>::Type Bits;
typedef Either<LANE_BYTES == 8, long long, i32>::Type SignedBits;
typedef Either<IS_SIGNED && IS_ORDER, SignedBits, Bits>::Type Integer;
typedef Either<ELEMENT == F64, double, Either<ELEMENT <= BF16, float, Integer>::Type>::Type Number;

constexpr u64 DOUBLE_NAN_BITS = 0x7ff8000000000000ull;

DEVICE u32 plus(u32 a, u32 b) { return a + b; }
DEVICE u64 plus(u64 a, u64 b) { return a + b; }
DEVICE u32 times(u32 a, u32 b) { return a * b; }
DEVICE u64 times(u64 a, u64 b) { return a * b; }

template <class T> DEVICE T lesser_of(T a, T b) { return a < b ? a : b; }
template <class T> DEVICE T greater_of(T a, T b) { return a > b ? a : b; }

DEVICE float of_bits(u32 bits, float) { return float_of(bits); }
DEVICE double of_bits(u64 bits, double) { return double_of(bits); }

// A NaN wins, and -0 is below +0. If the numbers are equal or unordered, `x` and `y` are one number each.
template <class T> DEVICE T lesser_number(T a, T b)
{
    const T x = a < b ? a : b, y = b < a ? b : a;
    return of_bits(bits_of(x) | bits_of(y), T());
}

template <class T> DEVICE T greater_number(T a, T b)
{
    const T x = a > b ? a : b, y = b > a ? b : a;
    return a != a ? a : b != b ? b : of_bits(bits_of(x) & bits_of(y), T());
}

DEVICE float lesser_of(float a, float b) { return lesser_number(a, b); }
DEVICE double lesser_of(double a, double b) { return lesser_number(a, b); }
DEVICE float greater_of(float a, float b) { return greater_number(a, b); }
DEVICE double greater_of(double a, double b) { return greater_number(a, b); }

template <u32 WHICH, class T> DEVICE T combined(T a, T b)
{
    if constexpr (WHICH == SUM) return plus(a, b);
    else if constexpr (WHICH == PRODUCT) return times(a, b);
    else if constexpr (WHICH == LEAST) return lesser_of(a, b);
    else if constexpr (WHICH == GREATEST) return greater_of(a, b);
    else if constexpr (WHICH == AND) return a & b;
    else if constexpr (WHICH == OR) return a | b;
    else return a ^ b;
}

// Combines the lanes of one operand with the lanes of the next one.
template <u32 COUNT> DEVICE void combine(Number (&a)[COUNT], const Number (&b)[COUNT])
{
    if constexpr (IS_COMPLEX) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 2) {
            const Number re = minus(times(a[i], b[i]), times(a[i + 1], b[i + 1]));
            a[i + 1] = plus(times(a[i], b[i + 1]), times(a[i + 1], b[i]));
            a[i] = re;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) a[i] = combined<OPERATOR>(a[i], b[i]);
    }
}

DEVICE float divided(float sum, u32 world) { return over(sum, (float)world); }
DEVICE double divided(double sum, u32 world) { return over(sum, (double)world); }

// The sum wraps to the size of an element, and the quotient is rounded towards zero.
template <class T> DEVICE T divided(T sum, u32 world)
{
    constexpr u32 UNUSED = 8 * (sizeof(T) - LANE_BYTES);
    const T bits = (T)(sum << UNUSED) >> UNUSED;
    const bool is_negative = IS_SIGNED && bits >> (8 * LANE_BYTES - 1) != 0;
    const T size = is_negative ? (T)((T)(0 - bits) << UNUSED) >> UNUSED : bits, quotient = size / world;
    return is_negative ? 0 - quotient : quotient;
}

// ---- Lanes and their bits ---------------------------------------------------------------------------------------

template <u32 TYPE, class T> DEVICE Number number_of(T bits)
{
    if constexpr (TYPE == F16) return widen_f16_to_any_nan(bits);
    else if constexpr (TYPE == BF16) return widen_bf16(bits);
    else if constexpr (TYPE == F32) return float_of(bits);
    else if constexpr (TYPE == F64) return double_of(bits);
    else if constexpr (TYPE == BOOL) return bits != 0;
    else if constexpr (IS_SIGNED && IS_ORDER) {
        constexpr u32 UNUSED = 8 * (sizeof(T) - LANE_BYTES);
        return (SignedBits)(bits << UNUSED) >> UNUSED;
    } else return bits;
}

// Every NaN becomes the canonical one. The bits above a lane have no meaning.
template <u32 TYPE, class T> DEVICE Bits bits_of_number(T number)
{
    if constexpr (TYPE == F16 || TYPE == BF16) return narrow<TYPE>(number);
    else if constexpr (TYPE == F32) return bits_of(canonical(number));
    else if constexpr (TYPE == F64) return number != number ? DOUBLE_NAN_BITS : bits_of(number);
    else return (Bits)number;
}

// Reads sixteen bytes with accesses of ACCESS bytes.
template <u32 ACCESS> DEVICE void read_words(u32 (&words)[WORDS], const u8 *at)
{
    if constexpr (ACCESS == 16) {
        const Quad quad = read_at<Quad>(at);
        words[0] = quad.x, words[1] = quad.y, words[2] = quad.z, words[3] = quad.w;
    } else if constexpr (ACCESS == 8) {
        const u64 low = read_at<u64>(at), high = read_at<u64>(at + 8);
        words[0] = (u32)low, words[1] = (u32)(low >> 32), words[2] = (u32)high, words[3] = (u32)(high >> 32);
    } else {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            const u8 *from = at + 4 * i;
            if constexpr (ACCESS == 4) words[i] = read_at<u32>(from);
            else if constexpr (ACCESS == 2) words[i] = read_at<u16>(from) | (u32)read_at<u16>(from + 2) << 16;
            else words[i] = read_at<u8>(from) | (u32)read_at<u8>(from + 1) << 8 | (u32)read_at<u8>(from + 2) << 16
                    | (u32)read_at<u8>(from + 3) << 24;
        }
    }
}

template <u32 ACCESS> DEVICE void write_words(u8 *at, const u32 (&words)[WORDS])
{
    if constexpr (ACCESS == 16) write_at<Quad>(at, Quad{words[0], words[1], words[2], words[3]});
    else if constexpr (ACCESS == 8) {
        write_at<u64>(at, words[0] | (u64)words[1] << 32);
        write_at<u64>(at + 8, words[2] | (u64)words[3] << 32);
    } else {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            u8 *to = at + 4 * i;
            if constexpr (ACCESS == 4) write_at<u32>(to, words[i]);
            else if constexpr (ACCESS == 2) write_at<u16>(to, (u16)words[i]), write_at<u16>(to + 2, (u16)(words[i] >> 16));
            else
#pragma unroll
                for (u32 byte = 0; byte < 4; byte++) write_at<u8>(to + byte, (u8)(words[i] >> 8 * byte));
        }
    }
}

// Lanes in each word, if a lane is not longer.
constexpr u32 IN_WORD = LANE_BYTES < 4 ? 4 / LANE_BYTES : 1;
constexpr u32 LANE_MASK = LANE_BYTES < 4 ? (1u << 8 * (LANE_BYTES % 4)) - 1 : ~0u;

// Reads a vector of one operand.
template <u32 ACCESS> DEVICE void read_vector(Number (&lanes)[LANES], const u8 *at)
{
    u32 words[WORDS];
    read_words<ACCESS>(words, at);
#pragma unroll
    for (u32 i = 0; i < LANES; i++) {
        Bits bits;
        if constexpr (LANE_BYTES == 8) bits = words[2 * i % WORDS] | (u64)words[(2 * i + 1) % WORDS] << 32;
        else bits = words[i / IN_WORD] >> 8 * LANE_BYTES * (i % IN_WORD) & LANE_MASK;
        lanes[i] = number_of<ELEMENT>(bits);
    }
}

template <u32 ACCESS> DEVICE void write_vector(u8 *at, const Number (&lanes)[LANES])
{
    u32 words[WORDS] = {};
#pragma unroll
    for (u32 i = 0; i < LANES; i++) {
        const Bits bits = bits_of_number<ELEMENT>(lanes[i]);
        if constexpr (LANE_BYTES == 8) words[2 * i % WORDS] = (u32)bits, words[(2 * i + 1) % WORDS] = (u32)((u64)bits >> 32);
        else words[i / IN_WORD] |= ((u32)bits & LANE_MASK) << 8 * LANE_BYTES * (i % IN_WORD);
    }
    write_words<ACCESS>(at, words);
}

// The type of one counted number in memory.
typedef Either<BYTES == 1, u8, Either<BYTES == 2, u16, Either<BYTES == 4, u32, u64>::Type>::Type>::Type Stored;

// ---- Parts ------------------------------------------------------------------------------------------------------

// The part of a block. Blocks from `first_block` on handle PART numbers each.
struct Work {
    u8 *to;
    u64 numbers;
    u32 first_block;
    u32 access;   // Bytes of an access: a power of two that divides all addresses.
    u32 operands; // Index of the first operand's address in the arguments' words.
};

DEVICE Work work_of_block(const Args &args)
{
    const u32 stride = HEAD + args.operands;
    u32 low = 0, high = args.parts;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (BLOCK >= (u32)args.words[middle * stride + 2]) low = middle;
        else high = middle;
    }
    const u64 *words = args.words + low * stride;
    return {(u8 *)words[0], words[1], (u32)words[2], (u32)(words[2] >> 32), low * stride + HEAD};
}

// Reduces COUNT vectors, STEP numbers apart, from number `at` on. All operands are read before a result is written, because
// the results may replace an operand.
template <u32 COUNT, u32 ACCESS> DEVICE void reduce_vectors(const Args &args, const Work &work, u64 at)
{
    const u64 offset = at * BYTES;
    Number lanes[COUNT][LANES];
#pragma unroll
    for (u32 row = 0; row < COUNT; row++)
        read_vector<ACCESS>(lanes[row], (const u8 *)args.words[work.operands] + offset + row * STEP * BYTES);
#pragma unroll 4
    for (u32 operand = 1; operand < args.operands; operand++) {
        const u8 *from = (const u8 *)args.words[work.operands + operand] + offset;
        Number next[COUNT][LANES];
#pragma unroll
        for (u32 row = 0; row < COUNT; row++) read_vector<ACCESS>(next[row], from + row * STEP * BYTES);
#pragma unroll
        for (u32 row = 0; row < COUNT; row++) combine(lanes[row], next[row]);
    }
#pragma unroll
    for (u32 row = 0; row < COUNT; row++) {
        if constexpr (DIVIDES)
            if (args.world != 0)
#pragma unroll
                for (u32 i = 0; i < LANES; i++) lanes[row][i] = divided(lanes[row][i], args.world);
        write_vector<ACCESS>(work.to + offset + row * STEP * BYTES, lanes[row]);
    }
}

DEVICE void read_one(Number (&lanes)[PARTS], u64 operand, u64 at)
{
    const u8 *from = (const u8 *)operand + at * BYTES;
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) lanes[i] = number_of<ELEMENT>((Bits)read_at<Stored>(from + i * BYTES));
}

// Reduces the element that begins with number `at`.
DEVICE void reduce_one(const Args &args, const Work &work, u64 at)
{
    Number lanes[PARTS];
    read_one(lanes, args.words[work.operands], at);
#pragma unroll 4
    for (u32 operand = 1; operand < args.operands; operand++) {
        Number next[PARTS];
        read_one(next, args.words[work.operands + operand], at);
        combine(lanes, next);
    }
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        if constexpr (DIVIDES)
            if (args.world != 0) lanes[i] = divided(lanes[i], args.world);
        write_at<Stored>(work.to + (at + i) * BYTES, (Stored)bits_of_number<ELEMENT>(lanes[i]));
    }
}

template <u32 ACCESS> DEVICE void reduce_block(const Args &args, const Work &work)
{
    const u64 begin = (u64)(BLOCK - work.first_block) * PART;
    if constexpr (ACCESS == 16)
        if (begin + PART <= work.numbers) return reduce_vectors<ROWS, ACCESS>(args, work, begin + THREAD * VECTOR);
#pragma unroll 1
    for (u32 row = 0; row < ROWS; row++) {
        const u64 at = begin + row * STEP + THREAD * VECTOR;
        if (at + VECTOR <= work.numbers) reduce_vectors<1, ACCESS>(args, work, at);
    }
    // Each thread has one element after the last whole vector.
    const u64 whole = work.numbers - work.numbers % VECTOR, one = whole + THREAD * PARTS;
    if (whole >= begin && whole < begin + PART && one < work.numbers) reduce_one(args, work, one);
}

#if ACCL_DIVIDES
// Divisions are calls of functions, which need registers.
LARGE_KERNEL(accl_reduce, THREADS)
#else
KERNEL(accl_reduce, THREADS)
#endif
{
    // Accesses shorter than sixteen bytes: as long as a word, if that is longer than a number, or as long as a number.
    constexpr u32 MIDDLE = BYTES > 4 ? BYTES : 4;
    const Work work = work_of_block(args);
    if (work.access >= 16) reduce_block<16>(args, work);
    else if (work.access >= MIDDLE) reduce_block<MIDDLE>(args, work);
    else if constexpr (BYTES < MIDDLE) reduce_block<BYTES>(args, work);
}

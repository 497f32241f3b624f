// The arguments of all kernels, and the part of them that a block of threads handles.
//
// Owns the layout of the arguments, which equals the layout in `spans.rs`, and the way from a block to its part of a tile.
// Does not know what a tile's bytes mean.

constexpr u32 CAPACITY = ACCL_CAPACITY;

// Bits of ACCL_KERNELS, the kernels that are compiled, in the order of `Kernel` in `mod.rs`.
#define ACCL_ENCODE (1 << 0)
#define ACCL_ENCODE_SUMS (1 << 1)
#define ACCL_FEEDBACK (1 << 2)
#define ACCL_FEEDBACK_SUMS (1 << 3)
#define ACCL_DECODE (1 << 4)
#define ACCL_DECODE_SUMS (1 << 5)
#define ACCL_DECODE_ADD (1 << 6)
#define ACCL_READ (1 << 7)
#define ACCL_ADD (1 << 8)
#define ACCL_FINISH (1 << 9)
#define ACCL_WRITE (1 << 10)
#define ACCL_COMBINE (1 << 11)
#define ACCL_COMBINE_SUMS (1 << 12)
#define ACCL_COPY (1 << 13)
#define ACCL_SQUARES (1 << 14)
#define ACCL_SQUARES_OF_SUMS (1 << 15)

// Equal tiles of one piece of a tensor. Only the last one may be shorter.
struct Span {
    u8 *values;      // The first element: the input of an encoding, the output of a decoding.
    u8 *code;        // The code of the first tile, after its header.
    u8 *sums;        // The first float32 sum, residual or result, by kernel.
    u8 *other;       // The code of the first tile of an operand, after its header; with error feedback, a flag.
    u64 elements;    // Number of elements.
    u64 first;       // Index of the first element in its tensor.
    u64 own;         // Key of the random numbers.
    u64 shared;      // Key that the ranks share whose values are added up.
    u64 step;        // 2^56 / world, rounded up.
    u32 rank;        // This rank among them.
    u32 world;       // Number of these ranks; 0 if correlated rounding is stochastic.
    u32 tile;        // Elements of a tile.
    u32 stride;      // Bytes from a tile's code to the code of the next tile, the header included.
    u32 first_block; // Number of the span's first block.
    u32 reserved;
};

struct Args {
    u64 *counters; // Buckets that are not finite, and buckets that are too large; null if they are not counted.
    u32 count;     // Number of spans.
    float divisor; // Divisor of finished sums, if there is one.
    u32 flags;     // Bits of FLAG_*.
    u32 reserved;
    Span spans[CAPACITY];
};

static_assert(sizeof(Span) == ACCL_SPAN_BYTES, "a span has another layout than in spans.rs");
static_assert(sizeof(Args) <= 4096, "the arguments exceed the parameters of a kernel");

// There is a divisor.
constexpr u32 FLAG_DIVIDES = 1;
// A tile of zeros is encoded without its residual, which stays.
constexpr u32 FLAG_KEEPS_ZEROS = 2;

// Length of a part that is a whole tile.
constexpr u32 WHOLE_TILE = 1u << 31;

// A part of a tile.
struct Work {
    Span span;
    u8 *code;     // The tile's code.
    u64 start;    // Index of the tile's first element in the span.
    u32 elements; // Elements of the tile.
    u32 part;     // Index of the part in its tile.
    bool is_last; // Whether it is the tile's last part.
};

DEVICE Span span_of_block(const Args &args)
{
    u32 index = 0;
    while (index + 1 < args.count && BLOCK >= args.spans[index + 1].first_block) index++;
    return args.spans[index];
}

// Finds this block's part of a tile. A part has PART elements, the last one of a tile fewer.
template <u32 PART> DEVICE Work work_of_block(const Args &args)
{
    Work work;
    work.span = span_of_block(args);
    const u32 parts = ceil_div(work.span.tile, PART), block = BLOCK - work.span.first_block;
    const u32 tile = block / parts;
    work.part = block % parts;
    work.start = (u64)tile * work.span.tile;
    const u64 left = work.span.elements - work.start;
    work.elements = left < work.span.tile ? (u32)left : work.span.tile;
    work.is_last = work.part + 1 == ceil_div(work.elements, PART);
    work.code = work.span.code + (u64)tile * work.span.stride;
    return work;
}

DEVICE void count_not_finite(const Args &args)
{
    if (args.counters) add_to(args.counters, 1);
}

DEVICE void count_too_large(const Args &args)
{
    if (args.counters) add_to(args.counters + 1, 1);
}

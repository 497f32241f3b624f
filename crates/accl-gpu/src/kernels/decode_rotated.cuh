// Kernels that decode rotated buckets. They follow `uniform.cu`, whose teams and slices they use.
//
// Owns the way of decoded buckets to memory.

// Calls `each` with decoded values, the index of the first of them in the span, and their number. `unencoded` gets the
// index of an element that was sent unencoded, and its value.
template <class Each, class Unencoded>
DEVICE void decode_part(Room &room, const Work &work, Each each, Unencoded unencoded)
{
    const Slice slice(work);
    const Reader reader(slice.code, slice.elements);
    const u32 coded = reader.coded();
    const u32 lane = IS_WIDE ? THREAD : THREAD % TEAM;
    const u32 begin = (slice.part * TEAMS + (IS_WIDE ? 0 : THREAD / TEAM)) * BUCKET;
    const u64 start = work.start + slice.start;
    float x[ROWS][EIGHT] = {};
    u32 counts[ROWS];
    auto read = [&] {
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const u32 at = begin + (row * TEAM + lane) * EIGHT;
            counts[row] = at < coded ? least(coded - at, EIGHT) : 0;
            if (counts[row] > 0) reader.read(x[row], at, counts[row]);
        }
    };
    read();
    rotate_back(x, room, lane);
    // The last elements are not rotated if they do not fill a bucket.
    if (begin + BUCKET > coded) read();
#pragma unroll
    for (u32 row = 0; row < ROWS; row++)
        if (counts[row] > 0) each(x[row], start + begin + (row * TEAM + lane) * EIGHT, counts[row]);
    if (!slice.is_last) return;
#pragma unroll 1
    for (u32 at = coded + THREAD; at < slice.elements; at += THREADS)
        unencoded(start + at, widen<TENSOR>(read_loose<TENSOR>(reader.tail() + (at - coded) * bytes_of(TENSOR))));
}

template <u32 TO> DEVICE void decode_to(const Args &args, Room &room)
{
    const Work work = work_of_block<PART>(args);
    decode_part(
        room, work,
        [&](const float (&values)[EIGHT], u64 at, u32 count) {
            write_eight<TO, TO_LARGEST>(work.span.values + at * bytes_of(TO), values, count);
        },
        [&](u64 at, float value) { write_number<TO>(work.span.values + at * bytes_of(TO), value); });
}

#if ACCL_KERNELS & ACCL_DECODE
KERNEL(accl_decode, THREADS)
{
    SHARED Room room;
    decode_to<TENSOR>(args, room);
}
#endif

#if ACCL_KERNELS & ACCL_DECODE_SUMS
KERNEL(accl_decode_sums, THREADS)
{
    SHARED Room room;
    decode_to<F32>(args, room);
}
#endif

#if ACCL_KERNELS & ACCL_DECODE_ADD
KERNEL(accl_decode_add, THREADS)
{
    SHARED Room room;
    const Work work = work_of_block<PART>(args);
    decode_part(
        room, work,
        [&](const float (&values)[EIGHT], u64 at, u32 count) {
            float sums[EIGHT];
            read_eight<F32>(sums, work.span.sums + at * 4, count);
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) sums[i] = sum_of(sums[i], values[i]);
            write_eight<F32, TO_INFINITY>(work.span.sums + at * 4, sums, count);
        },
        [&](u64 at, float value) {
            u8 *sum = work.span.sums + at * 4;
            write_number<F32>(sum, sum_of(read_number<F32>(sum), value));
        });
}
#endif

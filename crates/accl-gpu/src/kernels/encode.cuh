// Kernels that encode. A family defines `Room`, shared memory for a block of threads, and `encode`.
//
// Owns the choice of a source. Does not know codes.

// Encodes elements of the tensor's type.
#if ACCL_KERNELS & ACCL_ENCODE
KERNEL(accl_encode, THREADS)
{
    SHARED Room room;
    const Work work = work_of_block<PART>(args);
    encode(args, room, work, Values<TENSOR>(work));
}
#endif

template <u32 TYPE> DEVICE void encode_with_residual(const Args &args, Room &room)
{
    const Work work = work_of_block<PART>(args);
    const bool is_unused = work.span.other && read_at<u8>(work.span.other) == 0;
    const bool is_kept = is_unused || ((args.flags & FLAG_KEEPS_ZEROS) && has_only_zeros<TYPE, THREADS>(work));
    encode(args, room, work, WithResidual<TYPE>(work, is_kept));
}

// Encodes elements of the tensor's type with error feedback.
#if ACCL_KERNELS & ACCL_FEEDBACK
LARGE_KERNEL(accl_feedback, THREADS)
{
    SHARED Room room;
    encode_with_residual<TENSOR>(args, room);
}
#endif

// Encodes float32 sums of the tensor's elements.
#if ACCL_KERNELS & ACCL_ENCODE_SUMS
KERNEL(accl_encode_sums, THREADS)
{
    SHARED Room room;
    const Work work = work_of_block<PART>(args);
    encode(args, room, work, Values<F32>(work));
}
#endif

// Encodes float32 sums with error feedback.
#if ACCL_KERNELS & ACCL_FEEDBACK_SUMS
LARGE_KERNEL(accl_feedback_sums, THREADS)
{
    SHARED Room room;
    encode_with_residual<F32>(args, room);
}
#endif

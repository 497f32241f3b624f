//! The table of codecs: the source and the constants of each codec's kernels.
//!
//! Owns the choice of files, constants and shapes. Does not know the arguments of a launch.

use accl_kernels::codec::{Settings, Summary};

/// A file of the source.
pub(super) struct File {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

impl File {
    /// Returns the text, after a line that gives it its name in messages.
    pub(super) fn with_name(&self) -> String {
        format!("#line 1 \"{}\"\n{}\n", self.name, self.text)
    }
}

/// Lists files of this folder.
macro_rules! files {
    ($($name:literal)*) => { &[$(File { name: $name, text: include_str!($name) }),*] };
}

/// The files that all kernels need.
pub(super) const COMMON: &[File] = files!["prelude.cuh" "numbers.cuh" "spans.cuh"];
/// All files of the kernels that reduce elements.
pub(super) const REDUCTIONS: &[File] = files!["prelude.cuh" "numbers.cuh" "reduce.cu"];
/// The kernels of unencoded sums.
pub(super) const SUMS: &[File] = files!["sums.cu"];

/// Threads of a block, and the elements that a block handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) threads: u32,
    pub(super) part: u32,
}

/// Threads of most blocks.
const THREADS: u32 = 256;
/// Elements that a thread handles together.
const EIGHT: u32 = 8;
/// Lanes of a warp.
const WARP: u32 = 32;
/// Groups of eight elements that a lane may have in registers, so that none are spilled.
const MOST_ROWS: u32 = 4;

impl Shape {
    /// Shape of kernels that handle groups of eight elements independently of each other.
    pub(super) const SUMS: Shape = Shape { threads: THREADS, part: 2 * THREADS * EIGHT };
    /// Shape of kernels in which each warp handles a whole tile, of any length.
    pub(super) const TILES: Shape = Shape { threads: WARP, part: 1 << 31 };
}

/// Kernels that share source.
pub(super) struct Family {
    pub(super) files: &'static [File],
    /// Constants in addition to the codec's settings, with their names after `ACCL_`.
    pub(super) defines: Defines,
    /// Whether there are kernels that encode sums while they are added up: the codec decodes each group of eight
    /// elements by itself.
    pub(super) combines: bool,
    /// Shapes of the kernels that encode and that decode.
    pub(super) shapes: fn(&Settings) -> [Shape; 2],
}

/// The kernels of one codec.
pub(super) struct CodecKernels {
    pub(super) codec: &'static str,
    /// `None`: there are no kernels.
    pub(super) family: Option<Family>,
}

/// All codecs, in the order of `accl_kernels::codec::CODECS`.
pub(super) const TABLE: &[CodecKernels] = &[
    CodecKernels { codec: "raw", family: Some(cast(|_| vec![("WIRE", 3)])) },
    CodecKernels { codec: "bf16", family: Some(cast(|_| vec![("WIRE", 2)])) },
    CodecKernels { codec: "fp16", family: Some(cast(|_| vec![("WIRE", 1)])) },
    CodecKernels { codec: "maxmin", family: Some(uniform(|settings| uniform_defines(settings, 0))) },
    CodecKernels { codec: "absmax", family: Some(uniform(|settings| uniform_defines(settings, 1))) },
    CodecKernels { codec: "sign", family: Some(SIGN) },
    CodecKernels { codec: "e4m3", family: Some(scaled(|_| vec![("FORMAT", 0), ("SCALES", 0)])) },
    CodecKernels { codec: "e5m2", family: Some(scaled(|_| vec![("FORMAT", 1), ("SCALES", 0)])) },
    CodecKernels { codec: "mxfp8", family: Some(scaled(|_| vec![("FORMAT", 0), ("SCALES", 1)])) },
    CodecKernels { codec: "mxfp8_e5m2", family: Some(scaled(|_| vec![("FORMAT", 1), ("SCALES", 1)])) },
    CodecKernels { codec: "mxfp4", family: Some(scaled(|_| vec![("FORMAT", 2), ("SCALES", 1)])) },
    CodecKernels { codec: "nvfp4", family: Some(scaled(|_| vec![("FORMAT", 2), ("SCALES", 2)])) },
    CodecKernels { codec: "hadamard", family: Some(HADAMARD) },
    CodecKernels { codec: "topk", family: Some(TOP_K) },
];

/// Returns the kernels of a codec.
pub(super) fn of(codec: Summary) -> Option<&'static Family> {
    TABLE.iter().find(|row| row.codec == codec.row().name)?.family.as_ref()
}

/// The threads that have a bucket together: a power of two of lanes of a warp, or all threads of a block.
struct Team {
    /// Number of threads.
    lanes: u32,
    /// Groups of eight elements of each lane.
    rows: u32,
    block: Shape,
}

impl Team {
    fn of(bucket: u32) -> Self {
        let eights = bucket / EIGHT;
        if eights <= WARP * MOST_ROWS {
            let lanes = eights.next_power_of_two().min(WARP);
            let block = Shape { threads: THREADS, part: THREADS / lanes * bucket };
            return Self { lanes, rows: eights.div_ceil(lanes), block };
        }
        Self::of_block(bucket)
    }

    /// The team is a block of threads.
    fn of_block(bucket: u32) -> Self {
        let rows = (bucket / EIGHT).div_ceil(THREADS);
        let lanes = (bucket / EIGHT).div_ceil(rows).next_multiple_of(WARP);
        Self { lanes, rows, block: Shape { threads: lanes, part: bucket } }
    }

    /// The team of a bucket that is rotated. The rotation needs many registers, so that a lane has fewer rows.
    fn of_rotated(bucket: u32) -> Self {
        if bucket / EIGHT > 2 * WARP { Self::of_block(bucket) } else { Self::of(bucket) }
    }
}

/// Constants of a codec's settings, with their names after `ACCL_`.
type Defines = fn(&Settings) -> Vec<(&'static str, u32)>;

const fn cast(defines: Defines) -> Family {
    Family {
        files: files!["sources.cuh" "cast.cu" "encode.cuh" "combine.cuh"],
        combines: true,
        defines,
        shapes: |_| [Shape::SUMS; 2],
    }
}

const fn scaled(defines: Defines) -> Family {
    Family {
        files: files!["codes.cuh" "sources.cuh" "scaled.cu" "encode.cuh" "combine.cuh" "decode.cuh"],
        combines: true,
        defines,
        shapes: |_| [Shape { threads: THREADS, part: THREADS * EIGHT }, Shape::SUMS],
    }
}

/// Lanes that have a bucket of signs together.
const SIGN_LANES: u32 = 16;
/// Elements that a block encodes at least, if there are as many.
const LEAST_PART: u32 = 2048;
/// Elements that a block encodes at most, unless it has a single warp.
const MOST_PART: u32 = 16_384;

const SIGN: Family = Family {
    files: files!["codes.cuh" "sources.cuh" "sign.cu" "encode.cuh" "combine.cuh" "decode.cuh"],
    combines: true,
    defines: |_| Vec::new(),
    shapes: |settings| {
        let teams = (MOST_PART / settings.bucket).next_power_of_two();
        let threads = (teams * SIGN_LANES).clamp(WARP, THREADS);
        let row = threads / SIGN_LANES * settings.bucket;
        [Shape { threads, part: row * LEAST_PART.div_ceil(row) }, Shape::SUMS]
    },
};

const fn uniform(defines: Defines) -> Family {
    Family {
        files: files!["random.cuh" "codes.cuh" "sources.cuh" "rotation.cuh" "uniform.cu" "encode.cuh" "combine.cuh" "decode.cuh"],
        combines: true,
        defines,
        shapes: |settings| [Team::of(settings.bucket).block, Shape::SUMS],
    }
}

fn uniform_defines(settings: &Settings, is_symmetric: u32) -> Vec<(&'static str, u32)> {
    let team = Team::of(settings.bucket);
    vec![("SYMMETRIC", is_symmetric), ("ROTATES", 0), ("FACTOR_BITS", 0), ("TEAM", team.lanes), ("ROWS", team.rows)]
}

const TOP_K: Family = Family {
    files: files!["sources.cuh" "topk.cu" "encode.cuh"],
    combines: false,
    defines: |settings| {
        let team = Team::of(settings.bucket);
        vec![("TEAM", team.lanes), ("ROWS", team.rows)]
    },
    shapes: |settings| {
        let buckets = (DECODED_PART / settings.bucket).max(1);
        let decode = Shape { threads: THREADS, part: buckets * settings.bucket };
        [Team::of(settings.bucket).block, decode]
    },
};

/// Elements of whole buckets that a block decodes in shared memory, unless a bucket has more.
const DECODED_PART: u32 = 4096;

const HADAMARD: Family = Family {
    files: files!["random.cuh" "codes.cuh" "sources.cuh" "rotation.cuh" "uniform.cu" "encode.cuh" "decode_rotated.cuh"],
    combines: false,
    defines: |settings| {
        let team = Team::of_rotated(settings.bucket);
        let factor = (1.0 / f64::from(settings.bucket).sqrt()) as f32;
        vec![
            ("SYMMETRIC", 0),
            ("ROTATES", 1),
            ("FACTOR_BITS", factor.to_bits()),
            ("TEAM", team.lanes),
            ("ROWS", team.rows),
        ]
    },
    shapes: |settings| [Team::of_rotated(settings.bucket).block; 2],
};

#[cfg(test)]
mod tests {
    use accl_kernels::codec::CODECS;

    use super::*;

    #[test]
    fn every_codec_has_a_row_in_the_order_of_codecs() {
        let rows: Vec<&str> = TABLE.iter().map(|row| row.codec).collect();
        let codecs: Vec<&str> = CODECS.iter().map(|row| row.name).collect();
        assert_eq!(rows, codecs);
    }

    #[test]
    fn every_bucket_fits_its_team() {
        for bucket in (8..=8192).step_by(8) {
            let Team { lanes, rows, block } = Team::of(bucket);
            assert!(lanes * rows * EIGHT >= bucket && rows <= MOST_ROWS, "{bucket}");
            assert!(block.threads.is_multiple_of(WARP) && block.threads <= THREADS, "{bucket}");
            assert!(block.part <= 16_384 && block.part.is_multiple_of(bucket), "{bucket}");
        }
    }
}

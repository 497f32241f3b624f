//! Estimate of the duration of a call on a card. An engine counts its work for the call, and a few constants convert the counts to cycles.
//!
//! Owns the constants, the counts, and the parser of `--clock` and `--link`. Nothing here reads a clock: the same call takes the same number of
//! cycles in every run. Read [`CONSTANTS`] first.

use std::fmt::Write;

use accl_cclo::memory_map::NANOSECONDS_PER_CYCLE;

/// Constant of the estimate.
#[derive(Clone, Copy, Debug)]
pub struct Constant {
    /// Name of the constant.
    pub name: &'static str,
    /// Value in `unit`.
    pub value: u64,
    /// Unit of the value.
    pub unit: &'static str,
    /// Origin of the value, or `assumed`.
    pub source: &'static str,
}

const fn constant(name: &'static str, value: u64, unit: &'static str, source: &'static str) -> Constant {
    Constant { name, value, unit, source }
}

/// All constants of the estimate: `call + moves x move + bytes / (width x clock) + bytes on the wire / link + hops x hop`.
pub const CONSTANTS: [Constant; 6] = [
    constant("clock", 250_000_000, "Hz", "reference 9.2: boards run at 250 MHz"),
    constant("link", 100_000_000_000, "bit/s", "reference 14: clusters of 100 Gbit/s"),
    constant("hop", 2_000_000, "ps", "assumed: a switch and two network engines"),
    constant("call", 235, "cycles", "reference 14, issue 198: a nop takes 940 ns by the engine's counter"),
    constant("move", 100, "cycles", "assumed: firmware issues a command of the data mover and handles its completion"),
    constant("width", 64, "bytes a cycle", "reference 2.4: a word of the data path has 64 bytes"),
];
const CLOCK_HZ: u64 = CONSTANTS[0].value;
const LINK_BITS_PER_SECOND: u64 = CONSTANTS[1].value;
const HOP_PS: u64 = CONSTANTS[2].value;
const CALL_CYCLES: u64 = CONSTANTS[3].value;
const MOVE_CYCLES: u64 = CONSTANTS[4].value;
const WIDTH_BYTES: u64 = CONSTANTS[5].value;

const PS_PER_SECOND: u64 = 1_000_000_000_000;
const PS_PER_NANOSECOND: u64 = 1000;

/// Speed of the parts of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// Clock rate of the engine in cycles per second.
    pub clock_hz: u64,
    /// Bandwidth of a link in bits per second, in each direction.
    pub link_bits_per_second: u64,
    /// Latency of a message in addition to its transfer, in picoseconds.
    pub hop_ps: u64,
}

impl Default for Speed {
    fn default() -> Self {
        Self { clock_hz: CLOCK_HZ, link_bits_per_second: LINK_BITS_PER_SECOND, hop_ps: HOP_PS }
    }
}

/// Name of a unit, and its value in base units.
type Unit = (&'static str, u64);

const FREQUENCIES: &[Unit] = &[("Hz", 1), ("kHz", 1_000), ("MHz", 1_000_000), ("GHz", 1_000_000_000)];
/// Units of rates, the same as in `accl simulate`.
const RATES: &[Unit] = &[
    ("bit/s", 1),
    ("Kbit/s", 1_000),
    ("Mbit/s", 1_000_000),
    ("Gbit/s", 1_000_000_000),
    ("Tbit/s", 1_000_000_000_000),
    ("MB/s", 8_000_000),
    ("GB/s", 8_000_000_000),
];
const TIMES: &[Unit] = &[("ns", 1_000), ("us", 1_000_000), ("ms", 1_000_000_000), ("s", PS_PER_SECOND)];

impl Speed {
    /// Parses the values of `--clock` and `--link`.
    ///
    /// # Errors
    /// A sentence with the accepted form.
    pub fn parse(clock: &str, link: &str) -> Result<Self, String> {
        let clock_hz = quantity(clock, FREQUENCIES).filter(|&hz| hz > 0).ok_or_else(|| {
            format!("--clock: got `{clock}`; expected a number above zero in {}, such as 250MHz", names(FREQUENCIES))
        })?;
        let both = link.split_once(',').and_then(|(rate, hop)| Some((quantity(rate, RATES)?, quantity(hop, TIMES)?)));
        let (link_bits_per_second, hop_ps) = both.filter(|&(rate, _)| rate > 0).ok_or_else(|| {
            format!(
                "--link: got `{link}`; expected a rate above zero in {} and a time in {}, such as 100Gbit/s,2us",
                names(RATES),
                names(TIMES)
            )
        })?;
        Ok(Self { clock_hz, link_bits_per_second, hop_ps })
    }
}

/// Lists units in words.
fn names(units: &[Unit]) -> String {
    let mut text = String::new();
    for (index, (name, _)) in units.iter().enumerate() {
        let before = match index {
            0 => "",
            _ if index + 1 == units.len() => " or ",
            _ => ", ",
        };
        let _ = write!(text, "{before}{name}");
    }
    text
}

/// Parses digits, with an optional fraction, and a unit.
fn quantity(text: &str, units: &[Unit]) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(end);
    let (_, scale) = units.iter().find(|(name, _)| *name == unit.trim_start())?;
    let is_number = number.starts_with(|c: char| c.is_ascii_digit()) && number.ends_with(|c: char| c.is_ascii_digit());
    let value = number.parse::<f64>().ok().filter(|_| is_number)? * *scale as f64;
    // Larger values are not exact as `f64`, and none of them is plausible.
    const MOST: f64 = (1u64 << 53) as f64;
    (value <= MOST).then(|| value.round() as u64)
}

/// Work of an engine for a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Number of commands of the data mover.
    pub(crate) moves: u64,
    /// Bytes that the commands move.
    pub(crate) bytes: u64,
    /// Bytes sent on the wire, including headers.
    pub(crate) sent_bytes: u64,
    /// Bytes received from the wire.
    pub(crate) received_bytes: u64,
    /// Number of waits for a peer.
    pub(crate) hops: u64,
}

impl Counted {
    /// Returns the final value of the counter register.
    pub(crate) fn cycles(&self, speed: &Speed) -> u32 {
        let second = u128::from(PS_PER_SECOND);
        let (clock, link) = (u128::from(speed.clock_hz.max(1)), u128::from(speed.link_bits_per_second.max(1)));
        let firmware = u128::from(CALL_CYCLES + self.moves * MOVE_CYCLES) * second / clock;
        let data = u128::from(self.bytes) * second / (clock * u128::from(WIDTH_BYTES));
        // A link carries data in both directions at the same time.
        let wire = u128::from(self.sent_bytes.max(self.received_bytes)) * u128::from(u8::BITS) * second / link;
        let hops = u128::from(self.hops) * u128::from(speed.hop_ps);
        let cycles = (firmware + data + wire + hops) / u128::from(NANOSECONDS_PER_CYCLE * PS_PER_NANOSECOND);
        u32::try_from(cycles).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_does_nothing_takes_what_was_measured() {
        let cycles = Counted::default().cycles(&Speed::default());
        assert_eq!(u64::from(cycles) * NANOSECONDS_PER_CYCLE, 940);
    }

    #[test]
    fn each_part_counts_in_its_own_unit() {
        let speed = Speed::parse("500MHz", "8Gbit/s,1us").unwrap();
        let nanoseconds =
            |counted: Counted| u64::from(counted.cycles(&speed)) * NANOSECONDS_PER_CYCLE - CALL_CYCLES * 2 / 4 * 4;
        // Accurate to one unit of the register.
        let is = |counted, wanted: u64| assert!(nanoseconds(counted).abs_diff(wanted) <= 4, "{counted:?}");
        is(Counted { moves: 10, ..Counted::default() }, 2000);
        is(Counted { bytes: 64_000, ..Counted::default() }, 2000);
        is(Counted { sent_bytes: 1000, received_bytes: 4000, ..Counted::default() }, 4000);
        is(Counted { hops: 3, ..Counted::default() }, 3000);
    }

    #[test]
    fn more_than_the_register_holds_is_the_most_that_it_holds() {
        let counted = Counted { bytes: u64::MAX, moves: 1, sent_bytes: u64::MAX, received_bytes: 0, hops: u64::MAX };
        assert_eq!(counted.cycles(&Speed::default()), u32::MAX);
    }

    #[test]
    fn clocks_and_links_are_read_as_simulate_reads_them() {
        assert_eq!(Speed::parse("250MHz", "100Gbit/s,2us"), Ok(Speed::default()));
        let other = Speed { clock_hz: 1_500_000_000, link_bits_per_second: 12_500_000_000, hop_ps: 500_000 };
        assert_eq!(Speed::parse("1.5 GHz", "12.5Gbit/s, 500ns"), Ok(other));
        assert_eq!(Speed::parse("250MHz", "12.5GB/s,0us").map(|speed| speed.link_bits_per_second), Ok(100_000_000_000));
    }

    #[test]
    fn what_is_neither_is_refused_with_what_is_accepted() {
        for clock in ["", "250", "MHz", "0MHz", "-1MHz", "250mhz", "1.MHz", ".5MHz", "1e3MHz", "99999999999GHz"] {
            assert_eq!(
                Speed::parse(clock, "100Gbit/s,2us").unwrap_err(),
                format!("--clock: got `{clock}`; expected a number above zero in Hz, kHz, MHz or GHz, such as 250MHz")
            );
        }
        for link in ["", "100Gbit/s", "100Gbit/s,", "2us,100Gbit/s", "100Gb,2us", "0Gbit/s,2us", "100Gbit/s,2us,1"] {
            assert_eq!(
                Speed::parse("250MHz", link).unwrap_err(),
                format!(
                    "--link: got `{link}`; expected a rate above zero in bit/s, Kbit/s, Mbit/s, Gbit/s, Tbit/s, MB/s or GB/s and \
                     a time in ns, us, ms or s, such as 100Gbit/s,2us"
                )
            );
        }
    }

    #[test]
    fn every_constant_has_a_source() {
        assert!(CONSTANTS.iter().all(|constant| {
            constant.value > 0
                && (constant.source.starts_with("reference ") || constant.source.starts_with("assumed: "))
        }));
    }
}

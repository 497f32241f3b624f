//! The constants of the cost model: the time that a machine needs for each counted thing.
//!
//! Owns their names, defaults and text, which is sent between ranks and stored in the cache. All are integers, so that
//! equal text means equal choices on every processor. Measuring them is not done here. Read [`Machine`] first.

use std::fmt;
use std::str::FromStr;

/// Sizes of the measured calls, in bytes. Rates are interpolated between them, and constant beyond them.
pub const SIZES: [u64; 5] = [16 << 10, 128 << 10, 1 << 20, 4 << 20, 16 << 20];

/// Picoseconds per KiB for calls of each of [`SIZES`], which decide whether the buffers are in cache or memory.
pub type Rates = [u64; SIZES.len()];

/// The costs of a message between two ranks over one kind of link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// A call itself, whatever it does.
    pub call_ps: u64,
    /// Sending or receiving one frame, without its bytes.
    pub frame_ps: u64,
    /// Time from the writing of a frame until its receiver can see it.
    pub latency_ps: u64,
    /// Moving bytes from a tensor to the link.
    pub sent_ps_per_kib: Rates,
    /// Moving bytes from the link to a tensor.
    pub received_ps_per_kib: Rates,
}

/// The costs of the network between hosts, in addition to the software of `tcp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Latency in one direction, through wires and switches.
    pub latency_ps: u64,
    /// Time per KiB on a host's connection, in one direction.
    pub sent_ps_per_kib: u64,
}

/// The constants of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Shared memory.
    pub shm: Link,
    /// Sockets; between hosts the costs of `network` are added.
    pub tcp: Link,
    /// The network between hosts.
    pub network: Network,
    /// Additional cost of reducing received data instead of copying it.
    pub reduced_ps_per_kib: Rates,
    /// Copying between tensors.
    pub copied_ps_per_kib: Rates,
    /// Each tensor of a call that has one tensor per rank.
    pub block_ps: u64,
    /// Switching a core to another rank that waits for it.
    pub switch_ps: u64,
    /// Additional time of a message if a rank has several peers at once, in thousandths of the time of its bytes for
    /// each further peer.
    pub crowding_per_mille: u64,
    /// Number of cores that together move memory as fast as the host can.
    pub memory_cores: u64,
}

/// A recent server: rings in a shared cache, loopback sockets, ten gigabits per second between hosts in one rack.
impl Default for Machine {
    fn default() -> Self {
        Self {
            shm: Link {
                call_ps: 150_000,
                frame_ps: 100_000,
                latency_ps: 100_000,
                sent_ps_per_kib: [50_000, 50_000, 60_000, 60_000, 95_000],
                received_ps_per_kib: [50_000, 50_000, 60_000, 60_000, 80_000],
            },
            tcp: Link {
                call_ps: 1_000_000,
                frame_ps: 3_000_000,
                latency_ps: 2_500_000,
                sent_ps_per_kib: [250_000, 250_000, 300_000, 300_000, 350_000],
                received_ps_per_kib: [250_000, 250_000, 300_000, 300_000, 350_000],
            },
            network: Network { latency_ps: 10_000_000, sent_ps_per_kib: 819_200 },
            reduced_ps_per_kib: [10_000, 20_000, 20_000, 20_000, 60_000],
            copied_ps_per_kib: [50_000, 60_000, 60_000, 90_000, 130_000],
            block_ps: 50_000,
            switch_ps: 3_000_000,
            crowding_per_mille: 5,
            memory_cores: 8,
        }
    }
}

/// One constant, or one constant for each of [`SIZES`].
pub struct Constant {
    /// Its name in text; the suffix is the unit.
    pub name: &'static str,
    /// Its meaning.
    pub effect: &'static str,
    /// The smallest possible value. A time of 0 was not measured.
    pub least: u64,
    /// Returns its values in a machine.
    pub at: fn(&mut Machine) -> &mut [u64],
}

/// All constants.
pub const CONSTANTS: &[Constant] = &[
    Constant {
        name: "shm_call_ps",
        effect: "overhead of a call over shared memory",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.shm.call_ps),
    },
    Constant {
        name: "shm_frame_ps",
        effect: "sending or receiving a frame through shared memory, without its bytes",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.shm.frame_ps),
    },
    Constant {
        name: "shm_latency_ps",
        effect: "time until the receiver sees a frame in shared memory",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.shm.latency_ps),
    },
    Constant {
        name: "shm_sent_ps_per_kib",
        effect: "moving bytes from a tensor to shared memory",
        least: 1,
        at: |m| &mut m.shm.sent_ps_per_kib,
    },
    Constant {
        name: "shm_received_ps_per_kib",
        effect: "moving bytes from shared memory to a tensor",
        least: 1,
        at: |m| &mut m.shm.received_ps_per_kib,
    },
    Constant {
        name: "tcp_call_ps",
        effect: "overhead of a call over sockets",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.tcp.call_ps),
    },
    Constant {
        name: "tcp_frame_ps",
        effect: "sending or receiving a frame through a socket, without its bytes",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.tcp.frame_ps),
    },
    Constant {
        name: "tcp_latency_ps",
        effect: "time until the receiver sees a frame from a socket of the same host",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.tcp.latency_ps),
    },
    Constant {
        name: "tcp_sent_ps_per_kib",
        effect: "moving bytes from a tensor to a socket",
        least: 1,
        at: |m| &mut m.tcp.sent_ps_per_kib,
    },
    Constant {
        name: "tcp_received_ps_per_kib",
        effect: "moving bytes from a socket to a tensor",
        least: 1,
        at: |m| &mut m.tcp.received_ps_per_kib,
    },
    Constant {
        name: "network_latency_ps",
        effect: "latency between hosts in one direction, in addition to the software of sockets",
        least: 0,
        at: |m| std::slice::from_mut(&mut m.network.latency_ps),
    },
    Constant {
        name: "network_sent_ps_per_kib",
        effect: "sending bytes over a host's connection to the others, in one direction",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.network.sent_ps_per_kib),
    },
    Constant {
        name: "reduced_ps_per_kib",
        effect: "additional cost of reducing received bytes instead of copying them",
        least: 0,
        at: |m| &mut m.reduced_ps_per_kib,
    },
    Constant {
        name: "copied_ps_per_kib",
        effect: "copying from tensor to tensor",
        least: 1,
        at: |m| &mut m.copied_ps_per_kib,
    },
    Constant {
        name: "block_ps",
        effect: "each tensor of a call with one tensor per rank",
        least: 0,
        at: |m| std::slice::from_mut(&mut m.block_ps),
    },
    Constant {
        name: "switch_ps",
        effect: "switching a core to another rank",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.switch_ps),
    },
    Constant {
        name: "crowding_per_mille",
        effect: "additional time of bytes for each further peer at the same time, in thousandths",
        least: 0,
        at: |m| std::slice::from_mut(&mut m.crowding_per_mille),
    },
    Constant {
        name: "memory_cores",
        effect: "number of cores that move memory as fast as the host can",
        least: 1,
        at: |m| std::slice::from_mut(&mut m.memory_cores),
    },
];

/// Maximum value of a constant: sums of products stay far below 128 bits.
const LARGEST: u64 = 1 << 50;

impl Machine {
    /// The values of a constant.
    pub fn values(&self, constant: &Constant) -> Vec<u64> {
        (constant.at)(&mut self.clone()).to_vec()
    }

    /// The names of constants that are below their smallest possible value.
    pub fn impossible(&self) -> Vec<&'static str> {
        let is_below = |constant: &&Constant| self.values(constant).iter().any(|&value| value < constant.least);
        CONSTANTS.iter().filter(is_below).map(|constant| constant.name).collect()
    }

    /// Replaces constants that are [impossible](Self::impossible) by the built-in ones.
    #[must_use]
    pub fn made_possible(mut self) -> Self {
        let mut built_in = Self::default();
        for constant in CONSTANTS {
            let values = (constant.at)(&mut self);
            if values.iter().any(|&value| value < constant.least) {
                values.copy_from_slice((constant.at)(&mut built_in));
            }
        }
        self.smoothed()
    }

    /// Ensures that times per KiB do not fall with the size, so that more bytes never take less time. If two values
    /// contradict this, the lower one is used, because disturbances make measurements longer.
    #[must_use]
    pub fn smoothed(mut self) -> Self {
        let Self { shm, tcp, reduced_ps_per_kib, copied_ps_per_kib, .. } = &mut self;
        let of_links = [shm, tcp].map(|link| [&mut link.sent_ps_per_kib, &mut link.received_ps_per_kib]);
        for rates in of_links.into_iter().flatten().chain([reduced_ps_per_kib, copied_ps_per_kib]) {
            for index in (1..rates.len()).rev() {
                rates[index - 1] = rates[index - 1].min(rates[index]);
            }
        }
        self.memory_cores = self.memory_cores.max(1);
        self
    }
}

/// The rate for calls of `bytes` bytes.
pub(super) fn rate(rates: &Rates, bytes: u64) -> u64 {
    let Some(above) = SIZES.iter().position(|&size| bytes < size) else { return rates[SIZES.len() - 1] };
    let Some(below) = above.checked_sub(1) else { return rates[0] };
    let (from, to) = (u128::from(SIZES[below]), u128::from(SIZES[above]));
    // Interpolates in the logarithm of the size, which is approximated by a straight line within an octave.
    let log = |size: u128| (u128::from(size.ilog2()) << 16) + ((size << 16 >> size.ilog2()) - (1 << 16));
    let (at, whole) = (log(u128::from(bytes)) - log(from), log(to) - log(from));
    let step = u128::from(rates[above].saturating_sub(rates[below]));
    rates[below] + (step * at / whole) as u64
}

/// Formats as `name=value` or `name=value,value,...`, separated by spaces.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, constant) in CONSTANTS.iter().enumerate() {
            let values: Vec<String> = self.values(constant).iter().map(u64::to_string).collect();
            let blank = if index == 0 { "" } else { " " };
            write!(f, "{blank}{}={}", constant.name, values.join(","))?;
        }
        Ok(())
    }
}

/// Parses the same format. Constants that are left out keep their defaults.
impl FromStr for Machine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut machine = Machine::default();
        for word in text.split_whitespace() {
            let (name, values) = word.split_once('=').ok_or_else(|| format!("expected NAME=VALUE, got `{word}`"))?;
            let constant = CONSTANTS.iter().find(|constant| constant.name == name);
            let constant = constant.ok_or_else(|| format!("unknown constant `{name}`"))?;
            let parsed: Result<Vec<u64>, _> = values.split(',').map(str::parse::<u64>).collect();
            let places = (constant.at)(&mut machine);
            match parsed {
                Ok(parsed) if parsed.len() == places.len() && parsed.iter().all(|&value| value <= LARGEST) => {
                    places.copy_from_slice(&parsed);
                }
                Ok(_) | Err(_) => {
                    return Err(format!("{name}: expected {} numbers up to {LARGEST}, got `{values}`", places.len()));
                }
            }
        }
        Ok(machine.smoothed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_read_as_it_was_written() {
        let mut machine = Machine::default();
        for (index, constant) in CONSTANTS.iter().enumerate() {
            for (place, value) in (constant.at)(&mut machine).iter_mut().enumerate() {
                *value = (1000 * index + 10 * place + 7) as u64;
            }
        }
        assert_eq!(machine.to_string().parse::<Machine>(), Ok(machine));
        assert_eq!("".parse::<Machine>(), Ok(Machine::default()));
    }

    #[test]
    fn nonsense_is_refused_with_its_name() {
        for (text, named) in [
            ("shm_call_ps", "`shm_call_ps`"),
            ("speed=3", "`speed`"),
            ("switch_ps=x", "switch_ps"),
            ("switch_ps=-1", "switch_ps"),
            ("switch_ps=1,2", "switch_ps"),
            ("switch_ps=18446744073709551615", "switch_ps"),
            ("reduced_ps_per_kib=1,2", "reduced_ps_per_kib"),
        ] {
            let error = text.parse::<Machine>().unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn what_takes_no_time_is_impossible_and_the_built_in_constant_is_not() {
        let built_in = Machine::default();
        assert_eq!(built_in.impossible(), Vec::<&str>::new());
        assert_eq!(built_in.made_possible(), built_in);
        let machine: Machine = "shm_call_ps=0 tcp_latency_ps=0 copied_ps_per_kib=0,1,2,3,4 switch_ps=7 block_ps=0 \
                                reduced_ps_per_kib=0,0,0,0,0"
            .parse()
            .unwrap();
        assert_eq!(machine.impossible(), ["shm_call_ps", "tcp_latency_ps", "copied_ps_per_kib"]);
        let possible = machine.made_possible();
        assert_eq!(possible.impossible(), Vec::<&str>::new());
        assert_eq!((possible.shm.call_ps, possible.switch_ps), (built_in.shm.call_ps, 7));
        assert_eq!(possible.copied_ps_per_kib, built_in.copied_ps_per_kib);
        assert_eq!((possible.block_ps, possible.reduced_ps_per_kib), (0, [0; SIZES.len()]));
    }

    #[test]
    fn rates_lie_between_those_measured_and_never_fall() {
        let rates = [10, 20, 20, 70, 90];
        for (&size, &wanted) in SIZES.iter().zip(&rates) {
            assert_eq!(rate(&rates, size), wanted);
        }
        assert_eq!((rate(&rates, 0), rate(&rates, u64::MAX)), (10, 90));
        let mut last = 0;
        for bytes in (0..64 << 20).step_by(4099) {
            let now = rate(&rates, bytes);
            assert!(now >= last, "{bytes}");
            last = now;
        }
    }
}

//! The command that runs emulated engines, both as a separate program and as part of other programs.
//!
//! Owns the command line; the servers that it starts are in `serve`. Read [`run`] first.

use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use accl_cclo::hazards::HAZARDS;
use accl_cclo::memory_map::Network;
use clap::Parser;

use crate::program::Faithful;
use crate::serve::{Options, serve};
use crate::time::Speed;

/// Maximum number of ranks. Subscriptions name a rank by four digits.
const MOST_RANKS: i64 = 9999;

/// Emulates CCLO engines for hosts that speak the protocol of the ACCL project's emulator.
///
/// All ranks run in this process, or some of them with `--rank`. Rank r answers its host at port + r, and publishes packets at port + ranks + r.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Number of ranks.
    #[arg(short = 's', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS))]
    ranks: u32,
    /// Rank or range of ranks that runs in this process, such as 3 or 4-7; without it, all ranks.
    #[arg(short = 'r', long, value_name = "RANKS")]
    rank: Option<String>,
    /// First port.
    #[arg(short = 'p', long, default_value_t = 5500, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Network between the engines.
    #[arg(short = 'c', long, value_enum, default_value_t = Comms::Tcp)]
    comms: Comms,
    /// Log level of the original; accepted and ignored.
    #[arg(short = 'l', long, hide = true)]
    log_level: Option<u32>,
    /// Loops the data that an engine sends to kernels back to the engine.
    #[arg(short = 'b', long)]
    loopback: bool,
    /// Address at which this process listens.
    #[arg(long, default_value = "127.0.0.1")]
    bind: IpAddr,
    /// Host and first port of each rank, separated by commas: h0:5500,h1:5500.
    #[arg(long, value_delimiter = ',')]
    hosts: Vec<String>,
    /// Keeps firmware defects: all, or only the given numbers, such as 4,7.
    #[arg(long, value_name = "NUMBERS", num_args = 0..=1, default_missing_value = "all")]
    faithful: Option<String>,
    /// Seed of random decisions: with the same seed, `--faithful=10` hangs the same messages.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Clock of the engines, used to estimate the duration of a call for the counter register.
    #[arg(long, value_name = "FREQUENCY", default_value = "250MHz")]
    clock: String,
    /// Bandwidth of a link between engines, and the fixed time of each message.
    #[arg(long, value_name = "RATE,TIME", default_value = "100Gbit/s,2us")]
    link: String,
    /// Writes every request, reply and packet to a file, one JSON object per line.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Seconds that a call waits for the emulators of other ranks.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    peer_timeout: u32,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Comms {
    Udp,
    Tcp,
    #[value(name = "cyt_rdma")]
    CytRdma,
}

impl Arguments {
    fn faithful(&self) -> Result<Faithful, String> {
        let Some(text) = &self.faithful else { return Ok(Faithful::default()) };
        if text == "all" {
            return Ok(Faithful::all());
        }
        text.split(',').try_fold(Faithful::default(), |kept, number| {
            let known = HAZARDS.iter().find(|hazard| hazard.number.to_string() == number.trim());
            let hazard = known
                .ok_or_else(|| format!("--faithful: expected numbers from 1 to {}, got `{number}`", HAZARDS.len()))?;
            Ok(kept.with(hazard.number))
        })
    }

    fn hosts(&self) -> Result<Vec<(String, u16)>, String> {
        if self.hosts.is_empty() {
            return Ok((0..self.ranks).map(|_| ("127.0.0.1".to_owned(), self.port)).collect());
        }
        let host = |text: &String| {
            let (host, port) =
                text.rsplit_once(':').ok_or_else(|| format!("--hosts: expected HOST:PORT, got `{text}`"))?;
            let number = port.parse().ok().filter(|&number| number > 0);
            let number = number.ok_or_else(|| format!("--hosts: expected HOST:PORT, got port `{port}`"))?;
            Ok((host.to_owned(), number))
        };
        let hosts: Vec<_> = self.hosts.iter().map(host).collect::<Result<_, String>>()?;
        if hosts.len() != self.ranks as usize {
            return Err(format!("--hosts names {} ranks, but --ranks is {}", hosts.len(), self.ranks));
        }
        Ok(hosts)
    }

    fn own_ranks(&self) -> Result<Range<u32>, String> {
        let Some(text) = &self.rank else { return Ok(0..self.ranks) };
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let wrong = || format!("--rank: expected a rank or a range of ranks, such as 3 or 4-7, got `{text}`");
        let [first, last] = [first, last].map(|rank| rank.trim().parse::<u32>().ok());
        let (first, last) = first.zip(last).filter(|(first, last)| first <= last).ok_or_else(wrong)?;
        if last >= self.ranks {
            return Err(format!("--rank: rank {last} is not below --ranks, which is {}", self.ranks));
        }
        Ok(first..last + 1)
    }

    fn options(&self) -> Result<Options, String> {
        let ranks = self.own_ranks()?;
        let network = match self.comms {
            Comms::Udp => Network::Udp,
            Comms::Tcp => Network::Tcp,
            Comms::CytRdma => Network::Rdma,
        };
        let (hosts, faithful) = (self.hosts()?, self.faithful()?);
        let speed = Speed::parse(&self.clock, &self.link)?;
        Ok(Options {
            ranks,
            hosts,
            bind: self.bind,
            network,
            faithful,
            speed,
            seed: self.seed,
            loops_back: self.loopback,
            peer_timeout: Duration::from_secs(self.peer_timeout.into()),
            trace: self.trace.clone(),
        })
    }
}

/// Exit status of a command that cannot do what was asked.
const WRONG: u8 = 2;

/// Runs the command until the process is ended. Messages begin with `name`; `arguments` does not include the program's name. Returns an exit status:
/// 0 if help or the version was requested or the server ended without an error, otherwise 2.
pub fn run(name: &str, arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let command = [OsString::from(name)].into_iter().chain(arguments);
    let arguments = match Arguments::try_parse_from(command) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help goes to standard output, and everything else to standard error. If either is closed, the output is lost.
            let _ = error.print();
            return error.exit_code() as u8;
        }
    };
    match serve_as_asked(&arguments) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{name}: {error}");
            WRONG
        }
    }
}

fn serve_as_asked(arguments: &Arguments) -> Result<(), String> {
    let options = arguments.options()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    let said = options.places();
    let ready = move || println!("{said}");
    runtime.block_on(serve(options, ready)).map_err(|error| error.to_string())
}

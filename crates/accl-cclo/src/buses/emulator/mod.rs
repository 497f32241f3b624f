//! Bus to an emulator: JSON requests over a ZeroMQ socket, one at a time, each with a deadline.
//!
//! Drives both the emulator of the ACCL project and this project's own. The bus chooses the addresses of buffers itself, and needs no request that
//! the original lacks. The original describes neither itself nor its user. Therefore a second driver is detected on this project's emulator only. A
//! failed request leaves the socket in an undefined state, so the bus is dead afterwards.

mod address;
mod zmtp;

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use accl_types::hash::{fold, hash_words};
use accl_types::{Error, ErrorKind, Result};

use crate::bus::{Bus, Memory};
use crate::call::Descriptor;
use crate::control::{About, Reply, Request, Status, difference};
use crate::device::{BusKind, Design, Open, Sessions};
use crate::settings::Settings;
use address::{Address, emulator_of};
use zmtp::{Failure, Requester};

/// Maximum number of call ends that a disconnected host may have left.
const MOST_ENDS: u32 = 1024;
/// Time limit for a connection, and for a request about a register, a call or an allocation.
const REQUEST_DEADLINE: Duration = Duration::from_secs(1);
/// The same limit for a connection that only inspects a device, which may be stuck.
const LOOK_DEADLINE: Duration = Duration::from_millis(400);
/// Time limit for the first answer. The original sleeps for six seconds after its start.
const FIRST_DEADLINE: Duration = Duration::from_secs(10);
/// Maximum bytes of memory in one request. Requests stay short, so that a stuck request is noticed.
const CHUNK_BYTES: usize = 64 << 10;
/// Additional time for a request with a chunk of memory. The original takes 16 s for 4 MiB.
const CHUNK_DEADLINE: Duration = Duration::from_millis(1500);
/// The address of a buffer is a multiple of this many bytes.
const PAGE_BYTES: u64 = 4096;
/// End of memory: the original keeps addresses in 31 bits.
const MEMORY_BYTES: u64 = 1 << 31;
/// Control stream on which calls are started.
const CONTROL: u32 = 0;
/// Text sent for an emulator without a self-description.
const SAYS_NOTHING: &str = "says nothing";

pub(super) const ROW: BusKind = BusKind {
    scheme: "emulator",
    alias: None,
    forms: &["emulator://HOST:PORT", "emulator://HOST:PORT,HOST:PORT", "emulator://@FILE"],
    example: "emulator://localhost:5500",
    keys: &[],
    parse: address::parse,
    // Every message over TCP is eager, which the other designs support as well.
    design: Design::Tcp,
    suits_any_network: true,
    memory: Memory::Device,
    sessions: Sessions::Ranks,
    rank_address: address::rank_address,
    check: |url, _| {
        if url.has_ranks_key() {
            return Err("emulators have no key `ranks`; name the file after an at sign: emulator://@FILE".to_owned());
        }
        Ok(())
    },
    open: Open::Here(|url, rank| Ok(Box::new(EmulatorBus::open(&emulator_of(url, rank)?)?))),
};

/// Connection to an emulator.
pub struct EmulatorBus {
    socket: Requester,
    address: Address,
    /// End of the allocated part of device memory and of host memory, shared by all connections to the same emulator.
    handed_out: Arc<Mutex<[u64; 2]>>,
    /// Time limit for most answers, and for the next one.
    usual_deadline: Duration,
    next_deadline: Duration,
    /// Deadline of the caller, which no request outlasts.
    caller_deadline: Option<Instant>,
    /// Number of the job, computed once the ranks have exchanged their texts; zero before.
    job: u32,
    dead: Option<Error>,
}

impl EmulatorBus {
    /// Connects to an emulator.
    ///
    /// # Errors
    /// Nothing listens there, nothing answers, or the answer is not an emulator's.
    pub fn open(address: &Address) -> Result<Self> {
        let bus = Self::connect(address, Arc::default(), REQUEST_DEADLINE)?;
        Ok(Self { next_deadline: FIRST_DEADLINE, ..bus })
    }

    fn connect(address: &Address, handed_out: Arc<Mutex<[u64; 2]>>, deadline: Duration) -> Result<Self> {
        let socket = Requester::connect(address, deadline);
        let socket = socket.map_err(|failure| unconnected(address, &failure, deadline))?;
        Ok(Self {
            socket,
            address: address.clone(),
            handed_out,
            usual_deadline: deadline,
            next_deadline: deadline,
            caller_deadline: None,
            job: 0,
            dead: None,
        })
    }

    /// Sends a request and returns the reply. `more` extends the time limit.
    fn ask(&mut self, request: &Request, more: Duration) -> Result<Reply> {
        if let Some(dead) = &self.dead {
            return Err(dead.clone());
        }
        let left = self.caller_deadline.map(|until| until.saturating_duration_since(Instant::now()));
        let deadline = (self.next_deadline + more).min(left.unwrap_or(Duration::MAX));
        let answer = match self.socket.ask(request.to_json().as_bytes(), deadline) {
            Ok(text) => Reply::from_json(&text).map_err(|why| not_an_emulator(&self.address, why)),
            Err(Failure::Late) => Err(Error::new(
                ErrorKind::Device,
                format!(
                    "emulator at {} has not answered {} in {} ms; it is stopped, stuck or busy with something else",
                    self.address,
                    Named(request),
                    deadline.as_millis()
                ),
            )),
            Err(failure) => Err(unconnected(&self.address, &failure, deadline)),
        };
        self.next_deadline = self.usual_deadline;
        if let Err(error) = &answer {
            self.dead = Some(error.clone());
        }
        answer
    }

    fn expect_good(&mut self, request: &Request, more: Duration) -> Result<()> {
        match self.ask(request, more)? {
            Reply::Status(Status::Good) => Ok(()),
            reply => Err(self.refusal(request, &reply)),
        }
    }

    /// Allocates the next buffer of a memory and returns its address.
    fn hand_out(&self, is_host: bool, bytes: u64) -> Result<u64> {
        let mut handed_out = self.handed_out.lock().unwrap_or_else(PoisonError::into_inner);
        let next = &mut handed_out[usize::from(is_host)];
        let address = *next;
        let end = address.checked_add(bytes).filter(|end| *end < MEMORY_BYTES).ok_or_else(|| {
            let left = MEMORY_BYTES.saturating_sub(address);
            let text =
                format!("emulator at {} cannot allocate {bytes} bytes of memory: {left} bytes are left", self.address);
            Error::new(ErrorKind::Exhausted, text)
        })?;
        *next = end.next_multiple_of(PAGE_BYTES);
        Ok(address)
    }

    fn refusal(&self, request: &Request, reply: &Reply) -> Error {
        let said = match reply {
            Reply::Status(Status::Taken) => {
                let text = format!(
                    "emulator at {} was reset by another connection (`accl device reset` or another driver) and refuses requests of this \
                     process; create a new group",
                    self.address
                );
                return Error::new(ErrorKind::Device, text);
            }
            Reply::Status(Status::Not | Status::NoControl) => "refuses",
            _ => "sent an unexpected reply to",
        };
        Error::new(ErrorKind::Device, format!("emulator at {} {said} {}", self.address, Named(request)))
    }
}

fn not_an_emulator(address: &Address, why: impl fmt::Display) -> Error {
    let text = format!("the service at {address} does not speak the protocol of an emulator: {why}; check the port");
    Error::new(ErrorKind::Device, text)
}

/// Returns the error for a connection that failed or is unusable.
fn unconnected(address: &Address, failure: &Failure, deadline: Duration) -> Error {
    let text = match failure {
        Failure::Unreached(error) => {
            format!("no emulator answers at {address}: {error}; start `accl-emulator` there first")
        }
        Failure::UnreachedInTime => {
            format!(
                "cannot connect to {address} within {} ms; it is stopped, or is not an emulator",
                deadline.as_millis()
            )
        }
        Failure::Ungreeted | Failure::Late => format!(
            "the service at {address} did not complete the ZeroMQ greeting within {} ms; it is stopped, or is not an emulator",
            deadline.as_millis()
        ),
        // The end of a stream only says that the peer closed the connection.
        Failure::Closed(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            format!("emulator at {address} closed the connection; if it has exited, start it again")
        }
        Failure::Closed(error) => {
            format!("emulator at {address} closed the connection: {error}; if it has exited, start it again")
        }
        Failure::Refused(why) => format!("the service at {address} refused the connection: `{why}`"),
        Failure::Senseless(why) => return not_an_emulator(address, why),
    };
    Error::new(ErrorKind::Device, text)
}

impl Bus for EmulatorBus {
    /// Returns a random number and the emulator's self-description.
    fn local_info(&mut self, _: &Settings) -> Result<Option<String>> {
        let about = self.about()?;
        let about = about.map_or_else(|| SAYS_NOTHING.to_owned(), |about| Reply::About(about).to_json());
        Ok(Some(format!("{} {about}", RandomState::new().build_hasher().finish())))
    }

    /// Refuses incompatible emulators. Computes the number of the job from the numbers of all ranks.
    fn receive_info(&mut self, infos: &[String], _: &mut Settings) -> Result<()> {
        let mut numbers = Vec::new();
        let read = |(rank, text): (usize, &String)| {
            let (number, text) = text.split_once(' ').unwrap_or_default();
            let why = match (number.parse(), Reply::from_json(text.as_bytes())) {
                (Err(_), _) => "the text does not begin with a number".to_owned(),
                (Ok(number), _) if text == SAYS_NOTHING => {
                    numbers.push(number);
                    return Ok(None);
                }
                (Ok(number), Ok(Reply::About(about))) => {
                    numbers.push(number);
                    return Ok(Some(about));
                }
                (_, Ok(_)) => "the text is not a self-description".to_owned(),
                (_, Err(why)) => why,
            };
            let text = format!(
                "invalid self-description of the emulator of rank {rank}: {why}; install the same version of torch-accl on all hosts"
            );
            Err(Error::new(ErrorKind::Device, text))
        };
        let answers = infos.iter().enumerate().map(read).collect::<Result<Vec<_>>>()?;
        // Zero means that the job has no number.
        self.job = fold(hash_words(numbers)).max(1);
        difference(&answers).map_or(Ok(()), |why| Err(Error::new(ErrorKind::Configuration, why)))
    }

    /// Claims the emulator for this connection. The original refuses the request, and does not report an owner.
    fn claim(&mut self) -> Result<Option<String>> {
        let host = rustix::system::uname();
        let owner = format!("process {} of host {}", std::process::id(), host.nodename().to_string_lossy());
        let request = Request::Claim { owner, job: self.job };
        match self.ask(&request, Duration::ZERO)? {
            Reply::About(About { owner, owner_s, .. }) => Ok(Some(format!("{owner} (for {owner_s} s)"))),
            Reply::Status(Status::Taken) => Ok(Some("the driver that reset it".to_owned())),
            Reply::Status(_) => Ok(None),
            reply => Err(self.refusal(&request, &reply)),
        }
    }

    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.caller_deadline = deadline;
    }

    fn read_register(&mut self, offset: u32) -> Result<u32> {
        let request = Request::ReadRegister { offset };
        match self.ask(&request, Duration::ZERO)? {
            Reply::Register(value) => Ok(value),
            reply => Err(self.refusal(&request, &reply)),
        }
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        self.expect_good(&Request::WriteRegister { offset, value }, Duration::ZERO)
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64> {
        let is_host = memory.is_host();
        let address = self.hand_out(is_host, bytes)?;
        self.expect_good(&Request::Allocate { address, bytes: bytes as u32, is_host }, Duration::ZERO)?;
        Ok(address)
    }

    fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        for (chunk, address) in into.chunks_mut(CHUNK_BYTES).zip((address..).step_by(CHUNK_BYTES)) {
            let request = Request::ReadMemory { address, bytes: chunk.len() as u32, is_host: memory.is_host() };
            match self.ask(&request, CHUNK_DEADLINE)? {
                Reply::Memory(bytes) if bytes.len() == chunk.len() => chunk.copy_from_slice(&bytes),
                reply => return Err(self.refusal(&request, &reply)),
            }
        }
        Ok(())
    }

    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        for (chunk, address) in from.chunks(CHUNK_BYTES).zip((address..).step_by(CHUNK_BYTES)) {
            let request = Request::WriteMemory { address, data: chunk.to_vec(), is_host: memory.is_host() };
            self.expect_good(&request, CHUNK_DEADLINE)?;
        }
        Ok(())
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        self.expect_good(&Request::Call { control: CONTROL, call: *call }, Duration::ZERO)
    }

    fn poll(&mut self) -> Result<bool> {
        let request = Request::Poll { control: CONTROL };
        match self.ask(&request, Duration::ZERO)? {
            Reply::Status(Status::Good) => Ok(true),
            Reply::Status(Status::Not) => Ok(false),
            reply => Err(self.refusal(&request, &reply)),
        }
    }

    fn drain(&mut self) -> Result<()> {
        for _ in 0..=MOST_ENDS {
            if !self.poll()? {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::Device, format!("{} keeps reporting completed calls", self.describe())))
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        Ok(Box::new(Self::connect(&self.address, self.handed_out.clone(), LOOK_DEADLINE)?))
    }

    fn about(&mut self) -> Result<Option<About>> {
        match self.ask(&Request::About, Duration::ZERO)? {
            Reply::About(about) => Ok(Some(about)),
            Reply::Status(_) => Ok(None),
            reply => Err(self.refusal(&Request::About, &reply)),
        }
    }

    fn describe(&self) -> String {
        format!("emulator at {}", self.address)
    }
}

/// Shows a request in words, without its data.
struct Named<'a>(&'a Request);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = |is_host: bool| if is_host { "host" } else { "device" };
        match self.0 {
            Request::ReadRegister { offset } => write!(f, "a read of the register at {offset:#x}"),
            Request::WriteRegister { offset, .. } => write!(f, "a write of the register at {offset:#x}"),
            Request::ReadMemory { address, bytes, is_host } => {
                write!(f, "a read of {bytes} bytes of {} memory at {address:#x}", memory(*is_host))
            }
            Request::WriteMemory { address, data, is_host } => {
                write!(f, "a write of {} bytes of {} memory at {address:#x}", data.len(), memory(*is_host))
            }
            Request::Allocate { bytes, is_host, .. } => {
                write!(f, "an allocation of {bytes} bytes of {} memory", memory(*is_host))
            }
            Request::Call { call, .. } => write!(f, "the start of `{call}`"),
            Request::Poll { .. } => write!(f, "a poll of its call"),
            Request::About => write!(f, "a request for its self-description"),
            Request::Claim { .. } => write!(f, "a claim"),
        }
    }
}

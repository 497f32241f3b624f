//! Worlds of engines in one process, and a host that sets them up.

use super::settle::settle;
use accl_cclo::call::{ConfigFunction, Descriptor, Hosts, Operation};
use accl_cclo::control::{Reply, Request, Status};
use accl_cclo::memory_map::{
    self as map, ARITHMETIC_CONFIGS, Communicator, DataType, Network, RankEntry, RxBuffer, TableAllocator,
};
use accl_cclo::return_code::ReturnCode;
use accl_emulator::{Engine, Faithful};

/// Address at which the host's own buffers begin, after the rx and spare buffers.
const BUFFERS: u64 = 1 << 20;
/// Size of each of these buffers in bytes.
const BUFFER_BYTES: u64 = 1 << 20;

/// Parameters with which engines are set up.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub network: Network,
    pub faithful: Faithful,
    pub world: u32,
    pub rx_count: u32,
    pub rx_bytes: u32,
    pub max_eager: u32,
    pub max_rendezvous: u32,
    pub is_host: bool,
    /// Bit mask of the ranks whose buffers lie in the other memory.
    pub others: u32,
    /// Maximum number of ranks among which reductions and broadcasts are flat.
    pub flat_ranks: u32,
}

impl Settings {
    pub fn new(network: Network, world: u32) -> Self {
        Self {
            network,
            faithful: Faithful::default(),
            world,
            rx_count: 16,
            rx_bytes: 256,
            max_eager: 1024,
            max_rendezvous: 16 << 10,
            is_host: false,
            others: 0,
            flat_ranks: world,
        }
    }
}

/// Engines that reach one another.
pub struct World {
    pub engines: Vec<Engine>,
    settings: Settings,
    communicator: u32,
    configs: Vec<(DataType, u32)>,
}

/// Return code of a call on a rank; `None` if the call has not ended.
pub type Ended = Option<ReturnCode>;

impl World {
    /// Creates engines that are ready for calls.
    pub fn new(settings: Settings) -> Self {
        let engines = (0..settings.world).map(|_| Engine::new(settings.network, settings.faithful)).collect();
        let mut world = Self { engines, settings, communicator: 0, configs: Vec::new() };
        world.set_up_all();
        world
    }

    /// Sets up all engines from the beginning.
    pub fn set_up_all(&mut self) {
        for rank in 0..self.settings.world {
            self.set_up(rank);
        }
    }

    fn write(&mut self, rank: u32, offset: u32, value: u32) {
        let reply = self.engines[rank as usize].answer(&Request::WriteRegister { offset, value });
        assert_eq!(reply, Reply::Status(Status::Good));
    }

    fn write_all(&mut self, rank: u32, offset: u32, words: &[u32]) {
        for (word, at) in words.iter().zip((offset..).step_by(4)) {
            self.write(rank, at, *word);
        }
    }

    fn set_up(&mut self, rank: u32) {
        let Settings { world, rx_count, rx_bytes, max_eager, max_rendezvous, .. } = self.settings;
        self.config(rank, ConfigFunction::Reset, 0);
        let spares = u64::from(rx_count * rx_bytes);
        let all = spares + 3 * u64::from(max_rendezvous);
        assert!(all <= BUFFERS);
        let memory = self.engines[rank as usize].memory(false);
        assert!(memory.grow(0, all));
        let mut allocator = TableAllocator::default();
        let buffers = allocator.take(rx_count as usize * RxBuffer::COUNT).unwrap();
        for index in 0..rx_count {
            let buffer = RxBuffer::idle(u64::from(index * rx_bytes));
            self.write_all(rank, buffers.word(RxBuffer::COUNT * index as usize), &buffer.to_words());
        }
        self.write(rank, map::RX_BUFFER_BYTES.offset, rx_bytes);
        self.write(rank, map::RX_BUFFER_COUNT.offset, rx_count);
        for (index, [low, _]) in map::SPARE_BUFFERS.iter().enumerate() {
            self.write(rank, low.offset, spares as u32 + index as u32 * max_rendezvous);
        }
        let entry = |peer| RankEntry::new([127, 0, 0, 1].into(), 5500, peer, rx_bytes);
        let communicator = Communicator { local: rank, ranks: (0..world).map(entry).collect() };
        let place = allocator.take(Communicator::word_count(world as usize)).unwrap();
        self.write_all(rank, place.offset, &communicator.to_words());
        self.communicator = place.offset;
        self.configs.clear();
        for config in ARITHMETIC_CONFIGS.iter().filter(|config| config.compressed == config.uncompressed) {
            let place = allocator.take(config.word_count()).unwrap();
            self.write_all(rank, place.offset, &config.to_words());
            self.configs.push((config.uncompressed, place.offset));
        }
        for (register, value) in [
            (map::GATHER_FAN_IN, 2),
            (map::GATHER_FAN_IN_BYTES, 2048),
            (map::BROADCAST_FLAT_RANKS, self.settings.flat_ranks),
            (map::REDUCE_FLAT_RANKS, self.settings.flat_ranks),
            (map::REDUCE_FLAT_BYTES, 0),
            (map::IS_CONFIGURED, 1),
        ] {
            self.write(rank, register.offset, value);
        }
        self.config(rank, ConfigFunction::MaxEagerBytes, max_eager);
        self.config(rank, ConfigFunction::MaxRendezvousBytes, max_rendezvous);
        self.config(rank, ConfigFunction::EnablePackets, 0);
    }

    fn config(&mut self, rank: u32, function: ConfigFunction, value: u32) {
        assert!(self.engines[rank as usize].start(0, Descriptor::config(function, value)));
        self.settle();
        assert_eq!(self.ended(rank), Some(ReturnCode::default()), "{function:?}");
    }

    /// Advances until no engine can advance further.
    fn settle(&mut self) {
        settle(&mut self.engines, |_, _, _| ());
    }

    fn ended(&mut self, rank: u32) -> Ended {
        let engine = &mut self.engines[rank as usize];
        if engine.answer(&Request::Poll { control: 0 }) != Reply::Status(Status::Good) {
            return None;
        }
        match engine.answer(&Request::ReadRegister { offset: map::RETURN_CODE.offset }) {
            Reply::Register(code) => Some(ReturnCode(code)),
            other => panic!("{other:?}"),
        }
    }

    fn is_host(&self, rank: u32) -> bool {
        self.settings.is_host != (self.settings.others >> rank & 1 == 1)
    }

    /// Writes another communicator of the same ranks after all tables, and returns its offset.
    pub fn second_communicator(&mut self) -> u32 {
        const PLACE: u32 = 0x1800;
        let Settings { world, rx_bytes, .. } = self.settings;
        let entry = |peer| RankEntry::new([127, 0, 0, 1].into(), 5500, peer, rx_bytes);
        for local in 0..world {
            let communicator = Communicator { local, ranks: (0..world).map(entry).collect() };
            self.write_all(local, PLACE, &communicator.to_words());
        }
        PLACE
    }

    /// Returns a call of this operation on elements of this type. The caller sets `root` and other fields.
    pub fn call(&self, operation: Operation, dtype: DataType, count: u32) -> Descriptor {
        let arithmetic = self.configs.iter().find(|(known, _)| *known == dtype).map_or(0, |(_, offset)| *offset);
        Descriptor {
            count,
            communicator: self.communicator,
            arithmetic,
            first: BUFFERS,
            second: BUFFERS + BUFFER_BYTES,
            result: BUFFERS + BUFFER_BYTES,
            ..Descriptor::new(operation)
        }
    }

    /// Fills operand 0 of a rank, and makes room for results.
    pub fn fill(&mut self, rank: u32, bytes: &[u8]) {
        let is_host = self.is_host(rank);
        assert!(self.engines[rank as usize].memory(!is_host).grow(BUFFERS, 2 * BUFFER_BYTES));
        let memory = self.engines[rank as usize].memory(is_host);
        assert!(bytes.len() as u64 <= BUFFER_BYTES && memory.grow(BUFFERS, 2 * BUFFER_BYTES));
        memory.read_mut(BUFFERS, bytes.len()).unwrap().copy_from_slice(bytes);
        memory.read_mut(BUFFERS + BUFFER_BYTES, BUFFER_BYTES as usize).unwrap().fill(0xEE);
    }

    /// Returns operand 0 of a rank.
    pub fn source(&mut self, rank: u32, bytes: usize) -> Vec<u8> {
        let is_host = self.is_host(rank);
        self.engines[rank as usize].memory(is_host).read(BUFFERS, bytes).unwrap().to_vec()
    }

    /// Returns the result of a rank.
    pub fn result(&mut self, rank: u32, bytes: usize) -> Vec<u8> {
        let is_host = self.is_host(rank);
        self.engines[rank as usize].memory(is_host).read(BUFFERS + BUFFER_BYTES, bytes).unwrap().to_vec()
    }

    /// Starts a call on every rank, and returns how each has ended when no engine can advance further.
    pub fn run(&mut self, calls: &[Descriptor]) -> Vec<Ended> {
        for (rank, call) in (0..self.settings.world).zip(calls) {
            let call = Descriptor { hosts: Hosts::all(self.is_host(rank)), ..*call };
            assert!(self.engines[rank as usize].start(0, call));
        }
        self.settle();
        (0..self.settings.world).map(|rank| self.ended(rank)).collect()
    }
}

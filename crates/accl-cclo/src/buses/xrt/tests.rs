use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::library::SYMBOLS;
use super::{COMPLETED, HOST_ONLY, UNDER_WAY, XrtBus, XrtPlace, place_of};
use crate::bus::{Bus, Memory};
use crate::call::{Descriptor, Hosts, Operation};
use crate::device::DeviceUrl;
use crate::memory_map as map;

const ENGINE: &str = "ccl_offload:{ccl_offload_0}";
const HOSTCTRL: &str = "hostctrl:{hostctrl_0_0}";

/// Folder of a test, removed when dropped.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Compiles C code. The error is the compiler's output.
    fn compile(&self, source: &str, arguments: &[&str]) -> Result<(), String> {
        let source = self.file("source.c", source);
        let output = Command::new("cc").args(["-std=c11", "-Wall", "-Werror"]).args(arguments).arg(source).output();
        let output = output.map_err(|error| format!("cc cannot be run: {error}"))?;
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
    }

    /// Builds the replacement for XRT's library.
    fn stand_in(&self) -> PathBuf {
        let (library, log) = (self.0.path().join("stand_in.so"), self.file("log", ""));
        let log = format!("-DLOG=\"{}\"", log.display());
        let output = ["-shared", "-fPIC", "-o", library.to_str().unwrap(), &log];
        self.compile(include_str!("stand_in.c"), &output).unwrap();
        library
    }

    /// Returns the calls that the library has logged since the last look.
    fn taken(&self) -> Vec<String> {
        let log = self.0.path().join("log");
        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::write(&log, "").unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

fn place(index: u32, xclbin: &Path) -> XrtPlace<'_> {
    XrtPlace { index, xclbin, engine: ENGINE, hostctrl: HOSTCTRL }
}

fn refusal(library: &Path, place: XrtPlace) -> String {
    XrtBus::open_with(library, place).err().unwrap().1.message
}

#[test]
fn each_call_of_the_library_is_the_one_that_the_reference_has() {
    let folder = Folder::new();
    let (library, xclbin) = (folder.stand_in(), folder.file("a.xclbin", ""));
    let mut bus = XrtBus::open_with(&library, place(0, &xclbin)).unwrap_or_else(|(_, error)| panic!("{error}"));
    assert_eq!(
        folder.taken(),
        [
            "set Runtime.runtime_log to null",
            "open device 0",
            "load a.xclbin into device",
            "uuid of device",
            "open kernel ccl_offload:{ccl_offload_0} of device 00..0f exclusive",
            "open kernel hostctrl:{hostctrl_0_0} of device 00..0f shared",
            "open run of hostctrl",
        ]
    );

    bus.write_register(map::HARDWARE_ID.offset, 3).unwrap();
    assert_eq!(bus.read_register(map::HARDWARE_ID.offset), Ok(3));
    assert_eq!(folder.taken(), ["write engine 0x1ff8 = 0x3", "read engine 0x1ff8"]);
    assert!(bus.read_register(0x2000).unwrap_err().message.ends_with("has no register at 0x2000"));
    let text = bus.write_register(0, 0xBAD).unwrap_err().message;
    assert_eq!(text, "card 0 behind XRT could not write the register at 0x0: xrtKernelWriteRegister returned -5");
    folder.taken();

    let rx = bus.allocate_rx(4096).unwrap();
    let device = bus.allocate(Memory::Device, 100).unwrap();
    let host = bus.allocate(Memory::Host, 100).unwrap();
    assert_eq!([rx, device, host], [0x1_0100_0000, 0x1_0200_0000, 0x1_0300_0000]);
    bus.write_memory(Memory::Device, device + 8, b"abcd").unwrap();
    let mut seen = [0; 4];
    bus.read_memory(Memory::Device, device + 8, &mut seen).unwrap();
    assert_eq!(&seen, b"abcd");
    assert_eq!(
        folder.taken(),
        [
            "buffer of 4096 bytes, flags 0, bank 1 of device",
            "buffer of 100 bytes, flags 0, bank 0 of device",
            "buffer of 100 bytes, flags 0x20000000, bank 0 of device",
            "write 4 bytes of 0x102000000 at 8",
            "sync 4 bytes of 0x102000000 at 8, way 0",
            "sync 4 bytes of 0x102000000 at 8, way 1",
            "read 4 bytes of 0x102000000 at 8",
        ]
    );
    let text = bus.write_memory(Memory::Device, device + 97, b"abcd").unwrap_err().message;
    assert_eq!(text, "card 0 behind XRT could not write 4 bytes at 0x102000061: no buffer contains these bytes");
    let text = bus.allocate(Memory::Host, 2 << 20).unwrap_err().message;
    assert!(text.ends_with("few boards can use host memory; use `memory=device`"), "{text}");
    folder.taken();

    let call = Descriptor {
        count: 101,
        communicator: 102,
        root: 103,
        function: 1,
        tag: 0xFFFF_FFFF,
        arithmetic: 106,
        hosts: Hosts::all(true),
        first: device,
        second: host,
        result: 0xFFFF_FFFF_0000_0001,
        ..Descriptor::new(Operation::AllReduce)
    };
    assert_eq!(bus.poll(), Ok(false), "nothing was started");
    bus.start(&call).unwrap();
    assert_eq!(bus.poll(), Ok(false));
    let mut lines: Vec<String> = ["0xa", "0x65", "0x66", "0x67", "0x1", "0xffffffff", "0x6a", "0", "0x700"]
        .into_iter()
        .chain(["0x102000000", "0x103000000", "0xffffffff00000001"])
        .enumerate()
        .map(|(index, value)| format!("run argument {index} = {value}"))
        .collect();
    lines.extend(["start run".to_owned(), "state of run".to_owned()]);
    assert_eq!(folder.taken(), lines);

    let mut fresh = bus.reconnect().unwrap();
    assert_eq!(fresh.read_register(map::HARDWARE_ID.offset), Ok(3));
    assert!(
        fresh.write_register(0, 0).is_err() && fresh.start(&call).is_err() && fresh.allocate(Memory::Host, 1).is_err()
    );
    drop(fresh);
    bus.write_register(map::HARDWARE_ID.offset, COMPLETED).unwrap();
    assert_eq!((bus.poll(), bus.poll()), (Ok(true), Ok(false)), "an end is said once");
    folder.taken();
    drop(bus);
    assert_eq!(
        folder.taken(),
        [
            "free buffer 0x101000000",
            "free buffer 0x102000000",
            "free buffer 0x103000000",
            "close run",
            "close hostctrl",
            "close engine",
            "close device",
        ]
    );
}

#[test]
fn what_a_card_may_still_write_to_is_not_given_back() {
    let folder = Folder::new();
    let (library, xclbin) = (folder.stand_in(), folder.file("a.xclbin", ""));
    let mut bus = XrtBus::open_with(&library, place(0, &xclbin)).unwrap_or_else(|(_, error)| panic!("{error}"));
    bus.allocate(Memory::Device, 1).unwrap();
    bus.write_register(map::HARDWARE_ID.offset, 6).unwrap();
    bus.start(&Descriptor::new(Operation::Nop)).unwrap();
    let text = bus.poll().unwrap_err().message;
    assert_eq!(text, "card 0 behind XRT: a run failed with XRT state 6");
    folder.taken();
    drop(bus);
    assert_eq!(folder.taken(), [] as [&str; 0]);
}

#[test]
fn a_card_that_cannot_be_opened_is_reported_in_a_sentence() {
    let folder = Folder::new();
    let (library, xclbin) = (folder.stand_in(), folder.file("a.xclbin", ""));
    let shown = xclbin.display();
    let text = refusal(&library, place(0, Path::new("/nowhere/a.xclbin")));
    assert_eq!(text, "card 0 behind XRT needs its bitstream, and there is no file /nowhere/a.xclbin");
    let text = refusal(&library, place(7, &xclbin));
    assert_eq!(text, "XRT has no card 7; `xbutil examine` lists the cards");
    let other = folder.file("other-board.xclbin", "");
    let text = refusal(&library, place(0, &other));
    assert!(text.ends_with("(XRT returned -22); it may be for another board"), "{text}");
    let text = refusal(&library, XrtPlace { engine: "e", ..place(0, &xclbin) });
    assert_eq!(
        text,
        format!(
            "the bitstream {shown} has no kernel `e`, or another process has it; name the kernels with the keys `engine` and `hostctrl`"
        )
    );
    folder.taken();
    refusal(&library, XrtPlace { hostctrl: "h", ..place(0, &xclbin) });
    let closed = folder.taken();
    assert_eq!(closed[closed.len() - 2..], ["close engine", "close device"], "what was opened is closed");
    let text = refusal(&folder.0.path().join("none.so"), place(0, &xclbin));
    assert!(text.starts_with("card 0 behind XRT needs XRT, whose library cannot be opened: "), "{text}");
    assert!(text.ends_with("; install it (Debian: libxrt1), or source its setup.sh"), "{text}");
    let empty = folder.0.path().join("libxrt_coreutil.so.2.99.1");
    folder.compile("int nothing;", &["-shared", "-fPIC", "-o", empty.to_str().unwrap()]).unwrap();
    assert_eq!(
        refusal(&empty, place(0, &xclbin)),
        "card 0 behind XRT needs XRT's C interface, but the installed library, version 2.99.1, lacks `xrtIniStringSet`; install a version \
         that has it, such as 2.13"
    );
}

#[test]
fn a_card_that_another_process_has_is_said_to_be_in_use() {
    // The replacement library looks for `taken` in the whole path of a bitstream.
    let folder = Folder::new();
    let (library, xclbin) = (folder.stand_in(), folder.file("a.xclbin", ""));
    let text = refusal(&library, XrtPlace { engine: "taken", ..place(0, &xclbin) });
    assert!(
        text.starts_with("card 0 behind XRT is in use: another process has its engine's kernel or another bitstream"),
        "{text}"
    );
    let taken = folder.file("taken.xclbin", "");
    assert_eq!(refusal(&library, place(0, &taken)), text, "a bitstream cannot be loaded meanwhile");
}

#[test]
fn a_text_of_a_device_reaches_the_bus() {
    let url = DeviceUrl::parse("xrt://0?xclbin=/nowhere/a.xclbin").unwrap().unwrap();
    let text = crate::buses::open(&url, 0).err().unwrap().message;
    assert_eq!(text, "card 0 behind XRT needs its bitstream, and there is no file /nowhere/a.xclbin");
    let url = DeviceUrl::parse("xrt://2?hostctrl=h&xclbin=a").unwrap().unwrap();
    let XrtPlace { index, xclbin, engine, hostctrl } = place_of(&url).unwrap();
    assert_eq!((index, xclbin, engine, hostctrl), (2, Path::new("a"), ENGINE, "h"));
}

/// Returns the root of Debian's XRT: the installed one, or a copy that is unpacked into a folder. The error says why there is none.
fn debian(folder: &Folder) -> Result<PathBuf, String> {
    if Path::new("/usr/include/xrt/xrt/xrt_device.h").is_file() {
        return Ok(PathBuf::from("/"));
    }
    let run = |program: &str, arguments: &[&str]| {
        // A slow mirror must not block the test.
        let output =
            Command::new("timeout").arg("60").arg(program).args(arguments).current_dir(folder.0.path()).output();
        let output = output.map_err(|error| format!("{program}: {error}"))?;
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        if output.status.success() { Ok(()) } else { Err(format!("{program} {}: {said}", arguments.join(" "))) }
    };
    run("apt-get", &["download", "libxrt-dev", "libxrt1", "uuid-dev"])?;
    let root = folder.0.path().join("root");
    for entry in std::fs::read_dir(folder.0.path()).unwrap().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "deb") {
            run("dpkg", &["-x", entry.path().to_str().unwrap(), root.to_str().unwrap()])?;
        }
    }
    Ok(root)
}

/// Finds a file below a folder by its name.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    let here = entries.iter().find(|path| path.file_name().is_some_and(|file| file == name)).cloned();
    here.or_else(|| entries.iter().filter(|path| path.is_dir() && !path.is_symlink()).find_map(|path| find(path, name)))
}

/// Returns C code that assigns XRT's functions to this project's prototypes, followed by `extra`.
fn prototypes(extra: &str) -> String {
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdint.h>\n#include \"xrt.h\"\n#include \"ert.h\"\n#include \"xrt_mem.h\"\n\
         #include \"experimental/xrt_ini.h\"\n#include \"xrt/xrt_device.h\"\n#include \"xrt/xrt_kernel.h\"\n#include \"xrt/xrt_bo.h\"\n\
         typedef void *Handle; typedef unsigned int Uint; typedef int Int; typedef size_t Size; typedef uint32_t U32;\n\
         typedef uint64_t U64; typedef const char *Text; typedef uint32_t *OutU32; typedef unsigned char *OutUuid;\n\
         typedef const unsigned char *Uuid; typedef const void *Bytes; typedef void *OutBytes;\n",
    );
    for (name, arguments, result) in SYMBOLS {
        writeln!(text, "{result} (*our_{name})({}) = {name};", arguments.join(", ")).unwrap();
    }
    let states = ["NEW", "QUEUED", "RUNNING", "SUBMITTED"];
    for (name, state) in states.iter().zip(UNDER_WAY).chain([(&"COMPLETED", COMPLETED)]) {
        writeln!(text, "_Static_assert(ERT_CMD_STATE_{name} == {state}, \"{name}\");").unwrap();
    }
    writeln!(text, "_Static_assert(XCL_BO_SYNC_BO_TO_DEVICE == 0 && XCL_BO_SYNC_BO_FROM_DEVICE == 1, \"sync\");")
        .unwrap();
    writeln!(text, "_Static_assert(XCL_BO_FLAGS_HOST_ONLY == {HOST_ONLY}u, \"host only\");\n{extra}").unwrap();
    text
}

#[test]
fn prototypes_are_those_of_the_headers_and_debians_library_knows_no_card() {
    let folder = Folder::new();
    let root = match debian(&folder) {
        Ok(root) => root,
        Err(why) => return println!("skipped: no libxrt-dev of Debian's: {why}"),
    };
    let include = format!("-I{}", root.join("usr/include/xrt").display());
    let uuid = format!("-I{}", root.join("usr/include").display());
    let check = |extra: &str| folder.compile(&prototypes(extra), &["-fsyntax-only", &include, &uuid]);
    check("").unwrap_or_else(|said| panic!("{said}"));
    assert!(check("int (*wrong)(void *, int) = xrtDeviceClose;").is_err(), "a wrong prototype is found");
    let library = find(&root.join("usr/lib"), "libxrt_coreutil.so.2").expect("the package has the library");
    let xclbin = folder.file("a.xclbin", "");
    let said = refusal(&library, place(0, &xclbin));
    if said.contains("cannot open shared object file") {
        return println!("skipped: what Debian's library needs is not installed: {said}");
    }
    assert_eq!(said, "XRT has no card 0; `xbutil examine` lists the cards");
}

#[test]
fn a_card_that_may_still_write_to_its_buffers_keeps_them() {
    let folder = Folder::new();
    let (library, xclbin) = (folder.stand_in(), folder.file("a.xclbin", ""));
    let mut bus = XrtBus::open_with(&library, place(0, &xclbin)).unwrap_or_else(|(_, error)| panic!("{error}"));
    bus.allocate(Memory::Device, 4096).unwrap();
    bus.keep_buffers();
    folder.taken();
    drop(bus);
    assert_eq!(folder.taken(), [""; 0]);
}

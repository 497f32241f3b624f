use proptest::prelude::*;
use tempfile::{NamedTempFile, TempPath};

use super::keys;
use crate::bus::Memory;
use crate::buses::BUSES;
use crate::device::{Design, DeviceUrl, SHARED_KEYS, Wire};
use crate::memory_map::{DataType, NO_SESSION, Network};

fn parsed(text: &str) -> DeviceUrl {
    DeviceUrl::parse(text).unwrap().unwrap()
}

fn refused(text: &str) -> String {
    DeviceUrl::parse(text).unwrap_err().message
}

fn file(text: &str) -> TempPath {
    let path = NamedTempFile::new().unwrap().into_temp_path();
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn texts_are_read_and_shown_as_they_were() {
    for text in [
        "sim",
        "sim://?design=udp",
        "emulator://h0:5500",
        "emulator://h0:5500,h1:5600?design=udp&rx_buffers=32&rx_bytes=4KiB&eager=64KiB&rendezvous=1MiB",
        "emulator://[::1]:5500",
        "emulator://@ranks.json?memory=host",
        "xrt://1?xclbin=/tmp/a.xclbin&design=tcp&ranks=r.json&compression=fp16",
        "xrt://0?xclbin=a&engine=ccl_offload:{ccl_offload_1}&hostctrl=hostctrl:{hostctrl_1_0}",
        "coyote://0",
    ] {
        let url = parsed(text);
        assert_eq!(url.to_string(), text);
        assert_eq!(DeviceUrl::parse(&url.to_string()), Ok(Some(url)));
    }
    assert_eq!(parsed("1"), parsed("sim"));
    assert_eq!(parsed(" sim://? "), parsed("sim"));
    for text in ["", "none", " "] {
        assert_eq!(DeviceUrl::parse(text), Ok(None));
    }
    assert!(keys().iter().all(|key| key.about.ends_with('.') && !key.accepted.is_empty()));
}

#[test]
fn what_was_left_out_is_what_suits_the_place() {
    let sim = parsed("sim");
    assert_eq!((sim.design(), sim.memory(), sim.wire()), (Design::CytRdma, Memory::Host, Wire::Full));
    let emulator = parsed("emulator://h:1");
    assert_eq!((emulator.design(), emulator.memory()), (Design::Tcp, Memory::Device));
    assert_eq!(parsed("xrt://0?xclbin=a").design(), Design::Udp);
    assert_eq!(parsed("coyote://0").memory(), Memory::Host);
    let half = parsed("sim://?compression=fp16").wire();
    assert_eq!(
        [DataType::F32, DataType::F64, DataType::Bytes].map(|dtype| half.carries(dtype)),
        [DataType::F16, DataType::F64, DataType::Bytes]
    );
}

#[test]
fn a_text_that_makes_no_sense_says_what_would() {
    for (text, why) in [
        ("simm", "unknown scheme `simm`; did you mean sim? expected one of none, 1, sim, sim://?KEY=VALUE, "),
        ("http://h:1", "unknown scheme `http`"),
        ("sim://h0", "`sim` runs in the process of its rank and has no address; got `h0`"),
        ("sim://?desing=udp", "unknown key `desing`; did you mean design? expected one of xclbin, design, ranks, "),
        ("sim://?design=roce", "`design` cannot be `roce`; expected udp, tcp, cyt_rdma"),
        ("sim://?design", "`design` has no `=`"),
        ("sim://?eager=1&eager=2", "`eager` is given twice"),
        ("sim://?eager=large", "`eager` cannot be `large`; expected a size below 4 GiB"),
        ("sim://?eager=4GiB", "`eager` cannot be `4GiB`; expected a size below 4 GiB"),
        ("sim://?eager=64kb", "`eager` cannot be `64kb`; expected a size below 4 GiB"),
        ("sim://?memory=hbm", "`memory` cannot be `hbm`; expected host, device"),
        ("sim://?compression=int8", "`compression` cannot be `int8`; expected none, fp16"),
        (
            "sim://?rx_buffers=many",
            "`rx_buffers` cannot be `many`; expected a number from 1 to about 280, fewer with more ranks",
        ),
        ("sim://?xclbin=a", "`xclbin` is a key of xrt://INDEX only, not of sim"),
        ("sim://?engine=a", "`engine` is a key of xrt://INDEX only, not of sim"),
        ("emulator://", "expected HOST:PORT of an emulator, got ``"),
        ("emulator://h0", "expected HOST:PORT of an emulator, got `h0`"),
        ("emulator://h0:5500,:1", "expected HOST:PORT of an emulator, got `:1`"),
        ("emulator://h0:0", "expected HOST:PORT of an emulator, got `h0:0`"),
        ("emulator://@", "expected a ranks file after the `@`"),
        ("emulator://h:1?ranks=a", "emulators have no key `ranks`; name the file after an at sign: emulator://@FILE"),
        ("xrt://0", "a card behind XRT needs its bitstream; add `xclbin=FILE`"),
        ("xrt://0?xclbin=", "a card behind XRT needs its bitstream; add `xclbin=FILE`"),
        ("xrt://a?xclbin=b", "expected the index of a card, got `a`"),
        ("xrt://0?xclbin=b&design=cyt_rdma", "cards behind XRT are built for udp or tcp"),
        ("coyote://0?design=udp", "cards behind Coyote support cyt_rdma only"),
        ("coyote://0?memory=device", "buffers of cards behind Coyote lie in host memory"),
        ("sim://?rx_bytes=100", "size of an rx buffer: expected a multiple of 64 bytes, got 100"),
        ("sim://?rx_buffers=0", "rx buffers: expected from 1 to about 280, fewer with more ranks, got 0"),
        (
            "sim://?eager=64&rx_bytes=1KiB",
            "largest eager message: expected at least the 1024 bytes of an rx buffer, got 64",
        ),
        ("sim://?rendezvous=4MiB", "largest rendezvous message: expected more than the 4194304 bytes"),
        ("sim://?rx_bytes=1KiB", "an eager message of 4MiB has more than 64 segments of 1KiB"),
        ("sim://?rx_buffers=300", "the tables of 1 ranks and 300 rx buffers do not fit into the exchange memory"),
        ("sim://?rx_bytes=0", "size of an rx buffer: expected a multiple of 64 bytes, got 0"),
        ("sim://?eager=0", "largest eager message: expected at least"),
    ] {
        let message = refused(text);
        assert!(message.starts_with(&format!("device `{text}`: {why}")), "{message}");
    }
}

#[test]
fn settings_hold_a_whole_message_and_a_little_more() {
    let settings = parsed("sim").settings(1, 3).unwrap();
    assert_eq!((settings.rank, settings.world(), settings.network), (1, 3, Network::Rdma));
    assert_eq!((settings.rx_buffers, settings.rx_bytes), (80, 64 << 10));
    assert_eq!((settings.max_eager_bytes, settings.max_rendezvous_bytes), (4 << 20, 8 << 20));
    let small = parsed("sim://?eager=4KiB").settings(0, 2).unwrap();
    assert_eq!((small.rx_buffers, small.rx_bytes, small.max_rendezvous_bytes), (17, 4096, 8192));
    let large = parsed("sim://?eager=16MiB").settings(0, 2).unwrap();
    assert_eq!((large.rx_buffers, large.rx_bytes), (80, 256 << 10));
    let wide = parsed("sim://?rx_bytes=8MiB").settings(0, 2).unwrap();
    assert_eq!((wide.rx_buffers, wide.max_eager_bytes), (17, 8 << 20));
    for eager in (64..4096).chain([1_000_000, 5_000_001, 1 << 30]) {
        assert!(parsed(&format!("sim://?eager={eager}")).settings(0, 2).is_ok(), "{eager}");
    }
    let many = parsed("sim").settings(0, 300).unwrap_err().message;
    assert!(many.starts_with("device `sim`: the tables of 300 ranks and 80 rx buffers do not fit"), "{many}");
    assert_eq!(
        parsed("sim").settings(3, 3).unwrap_err().message,
        "device `sim`: rank 3 is not among the 3 ranks of the device"
    );
}

#[test]
fn ranks_compare_kind_and_keys_and_nothing_else() {
    let agreed = |text| parsed(text).agreed();
    assert_eq!(
        agreed("1"),
        "sim://?design=cyt_rdma&rx_buffers=80&rx_bytes=64KiB&eager=4MiB&rendezvous=8MiB&memory=host&compression=none"
    );
    assert_eq!(agreed("sim"), agreed("sim://?design=cyt_rdma&eager=4096KiB"));
    assert_eq!(agreed("emulator://h0:1"), agreed("emulator://h0:1,h1:2"));
    assert_eq!(agreed("emulator://@a.json"), agreed("emulator://h1:2?design=tcp"));
    assert_eq!(agreed("xrt://0?xclbin=a"), agreed("xrt://1?xclbin=b&ranks=c&design=udp"));
    for other in ["sim://?design=udp", "sim://?memory=device", "sim://?rx_buffers=16", "emulator://h:1?design=cyt_rdma"]
    {
        assert_ne!(agreed("sim"), agreed(other));
    }
}

#[test]
fn each_rank_has_an_address() {
    let peers = |text: &str, world| {
        let settings = parsed(text).settings(0, world).unwrap();
        settings.peers.iter().map(|peer| (peer.ip.to_string(), peer.port, peer.session)).collect::<Vec<_>>()
    };
    let local = |port, session| ("127.0.0.1".to_owned(), port, session);
    assert_eq!(peers("sim", 2), [local(5500, 0), local(5501, 1)]);
    assert_eq!(peers("emulator://localhost:6000", 2), [local(6000, 0), local(6001, 1)]);
    assert_eq!(peers("emulator://10.0.0.7:6000,h:9", 2), [("10.0.0.7".to_owned(), 6000, 0), local(9, 1)]);
    let cards = |sessions: [u32; 2]| {
        [("10.10.10.1".to_owned(), 5500, sessions[0]), ("10.10.10.2".to_owned(), 5501, sessions[1])]
    };
    assert_eq!(peers("xrt://0?xclbin=a", 2), cards([0, 1]));
    assert_eq!(peers("xrt://0?xclbin=a&design=tcp", 2), cards([NO_SESSION; 2]));
    assert_eq!(peers("coyote://0", 2), cards([NO_SESSION; 2]));
    let file =
        file(r#"{"ranks": [{"ip": "10.1.1.1", "session": 4, "max_segment": 1024}, {"ip": "10.1.1.2", "port": 7}]}"#);
    let ranks = file.display();
    let url = format!("xrt://0?xclbin=a&design=tcp&eager=4KiB&rx_bytes=1KiB&ranks={ranks}");
    assert_eq!(peers(&url, 2), [("10.1.1.1".to_owned(), 5500, 4), ("10.1.1.2".to_owned(), 7, NO_SESSION)]);
    let text = parsed(&url).settings(0, 3).unwrap_err().message;
    assert_eq!(text, format!("the ranks file {ranks} names 2 ranks, but there are 3"));
    let text = parsed(&format!("sim://?ranks={ranks}")).settings(0, 2).unwrap_err().message;
    assert!(
        text.ends_with("gives rank 0 segments of 1024 bytes; add `rx_bytes=1024`, or remove `max_segment`"),
        "{text}"
    );
    let text = parsed("xrt://0?xclbin=a").settings(0, 17).unwrap_err().message;
    assert!(text.ends_with("over udp, cards reach at most 16 ranks, not 17; use a tcp design"), "{text}");
}

#[test]
fn a_ranks_file_is_the_same_device_however_its_path_is_written() {
    let url = parsed("emulator://@/tmp/r");
    for text in ["emulator://@/tmp//r", "emulator://@/tmp/./r", "emulator://@/tmp/r/"] {
        let other = parsed(text);
        assert!(url.is_same_device(&other) && other.is_same_device(&url), "{text}");
        assert_eq!(other.to_string(), text);
    }
    for text in ["emulator://@/tmp/s", "emulator://@tmp/r", "emulator://h:1", "sim://?ranks=/tmp/r"] {
        assert!(!url.is_same_device(&parsed(text)), "{text}");
    }
    // The key `ranks` is not part of the address of a device.
    let card = |index: u32| parsed(&format!("coyote://{index}?ranks=r.json"));
    assert!(!card(0).is_same_device(&card(1)) && card(0).is_same_device(&parsed("coyote://0")));
}

#[test]
fn another_session_is_refused_without_naming_a_kind_of_device() {
    let file = file(r#"{"ranks": [{"ip": "10.1.1.1", "session": 7}]}"#);
    let ranks = file.display();
    for text in [format!("sim://?ranks={ranks}"), format!("emulator://@{ranks}")] {
        let message = parsed(&text).settings(0, 1).unwrap_err().message;
        let why = "gives rank 0 session 7; the session of this device is its rank";
        assert_eq!(message, format!("the ranks file {ranks} {why}"));
    }
}

#[test]
fn shared_keys_are_described_without_naming_a_kind_of_device() {
    for key in &SHARED_KEYS {
        let text = format!("{} {}", key.accepted, key.about).to_lowercase();
        let mut words = text.split(|c: char| !c.is_alphanumeric()).map(|word| word.trim_end_matches('s'));
        let kind = words.find(|word| BUSES.iter().any(|bus| bus.scheme == *word));
        assert_eq!(kind, None, "{key:?}");
    }
}

#[test]
fn missing_sessions_are_reported_before_anything_starts() {
    let checked = |text: &str| {
        let url = parsed(text);
        url.check_sessions(&url.settings(0, 2).unwrap()).map_err(|error| error.message)
    };
    let text = checked("xrt://0?xclbin=a&design=tcp").unwrap_err();
    let words =
        ["has no session to ranks 1: torch-accl does not set up", "network_krnl", "`ranks=FILE`, with a `session`"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let with_ranks = |session: &str| {
        let file = file(&format!(r#"{{"ranks": [{{"ip": "10.1.1.1"}}, {{"ip": "10.1.1.2"{session}}}]}}"#));
        checked(&format!("xrt://0?xclbin=a&design=tcp&ranks={}", file.display()))
    };
    assert!(with_ranks("").is_err());
    assert_eq!(with_ranks(r#", "session": 3"#), Ok(()));
    for text in ["sim", "emulator://h:1", "xrt://0?xclbin=a", "coyote://0"] {
        assert_eq!(checked(text), Ok(()), "{text}");
    }
}

/// Texts that resemble URLs of the kinds of bus, and other texts.
fn texts() -> impl Strategy<Value = String> {
    let schemes: Vec<&str> = BUSES.iter().map(|bus| bus.scheme).collect();
    let keys = "((eager|rx_bytes|rx_buffers|design|xclbin|memory|x)=[a-z0-9KMiB_]{0,8}&?){0,4}";
    let form = format!("({}|)(://)?[a-z0-9:,@.]{{0,12}}[?]?{keys}|.*", schemes.join("|"));
    proptest::string::string_regex(&form).unwrap()
}

proptest! {
    /// Any text is either refused, or accepted and shown with the same meaning.
    #[test]
    fn any_text_is_read_or_refused(text in texts()) {
        match DeviceUrl::parse(&text) {
            Ok(None) => prop_assert!(["", "none"].contains(&text.trim())),
            Ok(Some(url)) => {
                prop_assert_eq!(DeviceUrl::parse(&url.to_string()), Ok(Some(url.clone())));
                // Neither of these may panic.
                let _ = (url.agreed(), url.settings(0, 2));
            }
            Err(error) => prop_assert!(error.message.starts_with("device `"), "{}", error.message),
        }
    }
}

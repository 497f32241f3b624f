//! Every kind of bus has a row, and every row keeps the rules of a row.

use std::collections::BTreeSet;
use std::path::Path;

use accl_cclo::buses::{self, BUSES};
use accl_cclo::device::{BusKind, Design, DeviceUrl, Open, SHARED_KEYS, keys};
use accl_types::ErrorKind;
use proptest::prelude::*;

fn parsed(text: &str) -> DeviceUrl {
    DeviceUrl::parse(text).unwrap_or_else(|error| panic!("{error}")).unwrap()
}

/// Adds keys to the example of a row.
fn with_keys(bus: &BusKind, keys: &[String]) -> String {
    let mut text = bus.example.to_owned();
    for key in keys {
        let separator = match (text.contains("://"), text.contains('?')) {
            (_, true) => "&",
            (true, false) => "?",
            (false, false) => "://?",
        };
        text = format!("{text}{separator}{key}");
    }
    text
}

#[test]
fn each_file_of_buses_has_a_row() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/buses");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let stem = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let files: BTreeSet<String> = entries.map(|path| stem(&path)).filter(|name| name != "mod").collect();
    let rows: BTreeSet<String> = BUSES.iter().map(|bus| bus.scheme.to_owned()).collect();
    assert_eq!(files, rows, "each file or folder of src/buses is one row of BUSES, with the same name");
    assert_eq!(rows.len(), BUSES.len(), "two rows have the same scheme");
}

#[test]
fn a_row_is_named_in_the_message_that_lists_the_accepted_values() {
    let message = DeviceUrl::parse("no-such-bus://0").unwrap_err().message;
    for bus in BUSES {
        assert!(!bus.forms.is_empty(), "{bus:?}");
        for text in bus.alias.iter().chain(bus.forms) {
            assert!(message.contains(&format!(", {text}")), "{message} lacks {text}");
        }
        assert!(bus.forms.iter().all(|form| form.starts_with(bus.scheme)), "{bus:?}");
    }
}

#[test]
fn examples_are_shown_as_they_are_written() {
    for bus in BUSES {
        let url = parsed(bus.example);
        assert_eq!((url.bus(), url.to_string()), (bus, bus.example.to_owned()));
        assert!(url.is_same_device(&url), "{bus:?}");
        let settings = url.settings(1, 2).unwrap();
        assert_eq!((settings.network, settings.memory), (url.design().network(), url.memory()), "{bus:?}");
        let agreed = url.agreed();
        assert!(agreed.starts_with(&format!("{}://?design=", bus.scheme)), "{agreed}");
        for other in BUSES.iter().filter(|other| *other != bus) {
            let other = parsed(other.example);
            assert!(url != other && !url.is_same_device(&other) && agreed != other.agreed(), "{bus:?}, {other}");
        }
        if let Some(alias) = bus.alias {
            assert_eq!(parsed(alias), parsed(bus.scheme), "{bus:?}");
        }
    }
}

#[test]
fn the_defaults_of_a_row_are_accepted() {
    for bus in BUSES {
        assert!((bus.check)(&parsed(bus.example), 1).is_ok(), "{bus:?}");
        let design = format!("design={}", bus.design.name());
        let memory = if bus.memory.is_host() { "memory=host" } else { "memory=device" };
        let given: Vec<String> = [design, memory.to_owned()]
            .into_iter()
            .filter(|pair| !bus.example.contains(pair.split_once('=').unwrap().0))
            .collect();
        let url = parsed(&with_keys(bus, &given));
        assert!(url.is_same_device(&parsed(bus.example)), "{bus:?}");
    }
}

#[test]
fn keys_of_a_row_are_refused_elsewhere() {
    let shared = |name: &str| SHARED_KEYS.iter().any(|key| key.name == name);
    for bus in BUSES {
        for key in bus.keys {
            assert!(!shared(key.name), "{bus:?}: the key `{}` is shared", key.name);
            assert!(keys().iter().any(|known| known.name == key.name), "{bus:?}: {}", key.name);
            for other in BUSES.iter().filter(|other| other.keys.iter().all(|theirs| theirs.name != key.name)) {
                let text = with_keys(other, &[format!("{}=a", key.name)]);
                let message = DeviceUrl::parse(&text).unwrap_err().message;
                assert!(message.contains(&format!("`{}` is a key of {}://", key.name, bus.scheme)), "{message}");
            }
        }
        for (at, key) in bus.keys.iter().enumerate() {
            assert!(bus.keys[..at].iter().all(|earlier| earlier.name != key.name), "{bus:?}: {} twice", key.name);
            assert!(key.about.ends_with('.') && !key.accepted.is_empty(), "{key:?}");
        }
    }
}

#[test]
fn a_bus_of_the_layer_above_is_not_opened_here() {
    for bus in BUSES.iter().filter(|bus| matches!(bus.open, Open::Above(_))) {
        let error = buses::open(&parsed(bus.example), 0).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Internal);
        assert!(error.message.contains(&format!("no bus for the device `{}`", bus.scheme)), "{error}");
    }
}

/// Keys and values that any URL may have, as far as its bus does not refuse them.
fn pair() -> impl Strategy<Value = (&'static str, String)> {
    prop_oneof![
        prop::sample::select(vec![Design::Udp, Design::Tcp, Design::CytRdma])
            .prop_map(|design| ("design", design.name().to_owned())),
        prop::sample::select(vec!["host", "device"]).prop_map(|memory| ("memory", memory.to_owned())),
        prop::sample::select(vec!["none", "fp16"]).prop_map(|wire| ("compression", wire.to_owned())),
        "[a-z/.]{1,8}".prop_map(|path| ("ranks", path)),
        (80_u32..150).prop_map(|count| ("rx_buffers", count.to_string())),
        (1_u32..64).prop_map(|kib| ("rx_bytes", format!("{kib}KiB"))),
    ]
}

proptest! {
    /// The text of a URL and the URL are the same value, whichever keys it has and in whichever order they are written.
    #[test]
    fn keys_are_shown_in_one_order(
        row in 0..BUSES.len(), pairs in prop::collection::vec(pair(), 0..6), own in "[a-z:{}_./]{1,12}", seed in any::<prop::sample::Index>()
    ) {
        let bus = &BUSES[row];
        let mut given: Vec<String> = Vec::new();
        for (name, value) in pairs {
            if !bus.example.contains(&format!("{name}=")) && given.iter().all(|pair| !pair.starts_with(&format!("{name}="))) {
                given.push(format!("{name}={value}"));
            }
        }
        let optional = bus.keys.iter().filter(|key| !bus.example.contains(&format!("{}=", key.name)));
        given.extend(optional.map(|key| format!("{}={own}", key.name)));
        let mut turned = given.clone();
        if !turned.is_empty() {
            turned.rotate_left(seed.index(given.len()));
        }
        let text = with_keys(bus, &given);
        match (DeviceUrl::parse(&text), DeviceUrl::parse(&with_keys(bus, &turned))) {
            (Ok(Some(url)), other) => {
                prop_assert_eq!(Ok(Some(url.clone())), other);
                prop_assert_eq!(DeviceUrl::parse(&url.to_string()), Ok(Some(url.clone())));
                prop_assert!(url.is_same_device(&parsed(bus.example)));
            }
            // Which keys a bus refuses does not depend on their order.
            (refused, other) => prop_assert!(refused.is_err() && other.is_err(), "{}", text),
        }
    }

    /// The address part of any URL is refused, or shown with the same meaning.
    #[test]
    fn addresses_are_read_as_they_are_shown(row in 0..BUSES.len(), text in "[a-z0-9:,@./ ]{0,12}|@.{0,8}|[0-9]{1,11}") {
        let parse = BUSES[row].parse;
        if let Ok(address) = parse(&text) {
            prop_assert_eq!(parse(&address.text), Ok(address));
        }
    }
}

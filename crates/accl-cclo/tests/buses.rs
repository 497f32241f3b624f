//! Every kind of bus has a row, and every row keeps the rules of a row.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use accl_cclo::buses::{self, BUSES};
use accl_cclo::device::{BusKind, Design, DeviceUrl, Key, Open, SHARED_KEYS};
use accl_cclo::parse::keys;
use accl_types::ErrorKind;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};

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

/// Returns whether a URL has a key.
fn has_key(text: &str, name: &str) -> bool {
    let keys = text.split_once('?').map_or("", |(_, keys)| keys);
    keys.split('&').any(|pair| pair.split_once('=').is_some_and(|(key, _)| key == name))
}

/// Returns the own keys of a row that its example lacks.
fn further_keys(bus: &BusKind) -> Vec<&'static Key> {
    bus.keys.iter().filter(|key| !has_key(bus.example, key.name)).collect()
}

/// Runs a property of a row. It does not persist failures, because they do not say which row failed.
fn for_all<S: Strategy>(bus: &BusKind, strategy: &S, property: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    if let Err(error) = runner.run(strategy, property) {
        panic!("{bus:?}: {error}");
    }
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
            .filter(|pair| !has_key(bus.example, pair.split_once('=').unwrap().0))
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
fn examples_of_keys_are_accepted() {
    for bus in BUSES {
        for key in bus.keys.iter().filter(|key| has_key(bus.example, key.name)) {
            let text = parsed(bus.example).own_key(key.name).unwrap().to_owned();
            let (name, example) = (key.name, key.example);
            let other = bus.example.replace(&format!("{name}={text}"), &format!("{name}={example}"));
            assert_eq!(parsed(&other).own_key(name), Some(example), "{bus:?}");
        }
        for key in further_keys(bus) {
            let url = parsed(&with_keys(bus, &[format!("{}={}", key.name, key.example)]));
            assert_eq!(url.own_key(key.name), Some(key.example), "{bus:?}");
            let message = DeviceUrl::parse(&with_keys(bus, &[format!("{}=", key.name)])).unwrap_err().message;
            assert!(message.ends_with(&key.refused("")), "{message}");
        }
    }
    for key in &SHARED_KEYS {
        let pair = [format!("{}={}", key.name, key.example)];
        assert!(BUSES.iter().any(|bus| DeviceUrl::parse(&with_keys(bus, &pair)).is_ok()), "{key:?}");
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

/// Values of the own keys of a row: the example of the key or another text. Each key may be missing.
fn own_values(count: usize) -> impl Strategy<Value = Vec<Option<Option<String>>>> {
    let value = prop_oneof![3 => Just(None), 1 => "[a-z:{}_./]{1,12}".prop_map(Some)];
    prop::collection::vec(prop::option::of(value), count)
}

/// The text of a URL and the URL are the same value, whichever keys it has and in whichever order they are written.
#[test]
fn keys_are_shown_in_one_order() {
    for bus in BUSES {
        let further = further_keys(bus);
        let accepted = RefCell::new(BTreeSet::new());
        let strategy = (prop::collection::vec(pair(), 0..6), own_values(further.len()), any::<Index>());
        for_all(bus, &strategy, |(pairs, own, turn)| {
            let mut given: Vec<(&str, String)> = Vec::new();
            for (name, value) in pairs {
                if !has_key(bus.example, name) && given.iter().all(|(known, _)| *known != name) {
                    given.push((name, value));
                }
            }
            for (key, value) in further.iter().zip(own) {
                given.extend(value.map(|text| (key.name, text.unwrap_or_else(|| key.example.to_owned()))));
            }
            let mut turned: Vec<String> = given.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let text = with_keys(bus, &turned);
            if !turned.is_empty() {
                let by = turn.index(turned.len());
                turned.rotate_left(by);
            }
            match (DeviceUrl::parse(&text), DeviceUrl::parse(&with_keys(bus, &turned))) {
                (Ok(Some(url)), other) => {
                    prop_assert_eq!(Ok(Some(url.clone())), other);
                    prop_assert_eq!(DeviceUrl::parse(&url.to_string()), Ok(Some(url.clone())));
                    prop_assert!(url.is_same_device(&parsed(bus.example)));
                    accepted.borrow_mut().extend(given.iter().map(|(name, _)| *name));
                }
                // Which keys a bus refuses does not depend on their order.
                (refused, other) => prop_assert!(refused.is_err() && other.is_err(), "{}", text),
            }
            Ok(())
        });
        let accepted = accepted.into_inner();
        assert!(accepted.len() > further.len(), "{bus:?}: the only accepted keys are {accepted:?}");
        for key in further {
            assert!(accepted.contains(key.name), "{bus:?}: no URL with the key `{}` was accepted", key.name);
        }
    }
}

/// Texts that differ from an address in a few places, and other texts.
fn addresses(example: &str) -> impl Strategy<Value = String> + use<> {
    let own: Vec<char> = if example.is_empty() { vec!['0'] } else { example.chars().collect() };
    let character = prop_oneof![
        2 => prop::sample::select(own),
        2 => "[a-z0-9:,@./ ]".prop_map(|text| text.chars().next().unwrap()),
        1 => prop::sample::select(vec!['\t', '\u{a0}', '_', '-', '+', '[', ']', 'A']),
    ];
    let change = (0..4, any::<Index>(), character);
    let example = example.to_owned();
    let changed = prop::collection::vec(change, 0..4).prop_map(move |changes| {
        let mut text: Vec<char> = example.chars().collect();
        for (kind, at, character) in changes {
            let at = at.index(text.len() + 1);
            match kind {
                0 if at < text.len() => text[at] = character,
                1 if at < text.len() => drop(text.remove(at)),
                // Lists of addresses.
                2 => text = [&text[..], &[character], &text[..]].concat(),
                _ => text.insert(at, character),
            }
        }
        text.into_iter().collect()
    });
    prop_oneof![2 => changed, 1 => "[a-z0-9:,@./ ]{0,12}|@.{0,8}|[0-9]{1,11}"]
}

/// The address part of any URL is refused, or shown with the same meaning.
#[test]
fn addresses_are_read_as_they_are_shown() {
    for bus in BUSES {
        let example = parsed(bus.example).address().to_owned();
        let accepted = RefCell::new(BTreeSet::new());
        for_all(bus, &addresses(&example), |text| {
            if let Ok(address) = (bus.parse)(&text) {
                let again = (bus.parse)(&address.text);
                prop_assert_eq!(again.as_ref().map(|again| &again.text), Ok(&address.text), "from {:?}", text);
                prop_assert_eq!(again, Ok(address));
                accepted.borrow_mut().insert(text);
            }
            Ok(())
        });
        // The example itself, and other texts if the kind has addresses.
        let least = if example.is_empty() { 1 } else { 2 };
        let accepted = accepted.into_inner();
        assert!(accepted.len() >= least, "{bus:?}: accepted only {accepted:?}");
    }
}

//! Parser of device URLs.
//!
//! Owns the general form `SCHEME://ADDRESS?KEY=VALUE&...` and the shared keys. The rows of [`BUSES`] own the schemes, the addresses and all other
//! keys. Read [`DeviceUrl::parse`] first.

use accl_types::{Error, ErrorKind, Result, nearest, parse_size};

#[cfg(test)]
mod tests;

use crate::bus::Memory;
use crate::buses::BUSES;
use crate::design::Design;
use crate::device::{DeviceUrl, Key, SHARED_KEYS, Wire, memory_name};

const DESIGNS: [Design; 3] = [Design::Udp, Design::Tcp, Design::CytRdma];
const MEMORIES: [Memory; 2] = [Memory::Host, Memory::Device];
const WIRES: [Wire; 2] = [Wire::Full, Wire::Half];

/// Returns the keys of all kinds of bus, each name once, in the order in which URLs show them.
pub fn keys() -> Vec<&'static Key> {
    let own = |is_required: bool| {
        BUSES.iter().flat_map(|bus| bus.keys).filter(move |key| key.missing.is_some() == is_required)
    };
    let mut keys: Vec<&Key> = Vec::new();
    for key in own(true).chain(&SHARED_KEYS).chain(own(false)) {
        if keys.iter().all(|known| known.name != key.name) {
            keys.push(key);
        }
    }
    keys
}

impl DeviceUrl {
    /// Parses a URL: `sim` or its synonym `1`, `sim://?design=udp`, `emulator://h0:5500,h1:5500`, `emulator://@ranks.json`,
    /// `xrt://0?xclbin=a.xclbin&design=udp`, `coyote://0`. Returns `None` if the text is empty or `none`, which means no device.
    ///
    /// # Errors
    /// The text is malformed, or firmware would refuse the values for any set of ranks. The message says what is expected.
    pub fn parse(text: &str) -> Result<Option<Self>> {
        let text = text.trim();
        if matches!(text, "" | "none") {
            return Ok(None);
        }
        let url = Self::read(text).map_err(|why| refused(text, &why))?;
        url.check_alone().map_err(|error| refused(text, &error.message))?;
        Ok(Some(url))
    }

    fn read(text: &str) -> std::result::Result<Self, String> {
        let text = BUSES.iter().find(|bus| bus.alias == Some(text)).map_or(text, |bus| bus.scheme);
        let (scheme, rest) = text.split_once("://").unwrap_or((text, ""));
        let (address, keys) = rest.split_once('?').unwrap_or((rest, ""));
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for pair in keys.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("`{pair}` has no `=`"))?;
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(format!("`{key}` is given twice"));
            }
            pairs.push((key, value));
        }
        let bus = BUSES.iter().find(|bus| bus.scheme == scheme).ok_or_else(|| {
            let near = nearest(scheme, BUSES.iter().map(|bus| bus.scheme)).unwrap_or_default();
            format!("unknown scheme `{scheme}`; did you mean {near}? {}", expected())
        })?;
        let mut own = Vec::new();
        for key in bus.keys {
            let at = pairs.iter().position(|(name, _)| *name == key.name);
            match (at.map(|at| pairs.remove(at).1), key.missing) {
                (Some("") | None, Some(missing)) => return Err(missing.to_owned()),
                (Some(""), None) => return Err(key.refused("")),
                (Some(value), _) => own.push((key.name, value.to_owned())),
                (None, None) => {}
            }
        }
        let mut url = Self::at(bus, (bus.parse)(address)?, own);
        for (key, value) in pairs {
            url.set(key, value)?;
        }
        Ok(url)
    }

    /// Sets a shared key.
    fn set(&mut self, name: &str, value: &str) -> std::result::Result<(), String> {
        let key = SHARED_KEYS.iter().find(|key| key.name == name).ok_or_else(|| self.not_shared(name))?;
        let unknown = || key.refused(value);
        let bytes = || parse_size(value).and_then(|bytes| u32::try_from(bytes).ok()).map(Some).ok_or_else(unknown);
        match name {
            "design" => self.design = Some(find(&DESIGNS, Design::name, value).ok_or_else(unknown)?),
            "ranks" if value.is_empty() => return Err(unknown()),
            "ranks" => self.ranks = Some(value.into()),
            "rx_buffers" => self.rx_buffers = Some(value.parse().map_err(|_| unknown())?),
            "rx_bytes" => self.rx_bytes = bytes()?,
            "eager" => self.eager = bytes()?,
            "rendezvous" => self.rendezvous = bytes()?,
            "memory" => self.memory = Some(find(&MEMORIES, memory_name, value).ok_or_else(unknown)?),
            "compression" => self.compression = Some(find(&WIRES, Wire::name, value).ok_or_else(unknown)?),
            other => return Err(self.not_shared(other)),
        }
        Ok(())
    }

    /// Returns the error for a key that is neither shared nor a key of this kind of bus.
    fn not_shared(&self, name: &str) -> String {
        let owners = BUSES.iter().filter(|bus| bus.keys.iter().any(|key| key.name == name));
        let owners: Vec<&str> = owners.map(|bus| bus.short_form()).collect();
        if !owners.is_empty() {
            return format!("`{name}` is a key of {} only, not of {}", owners.join(" and "), self.scheme());
        }
        let all: Vec<&str> = keys().into_iter().map(|key| key.name).collect();
        let near = nearest(name, all.iter().copied()).unwrap_or_default();
        format!("unknown key `{name}`; did you mean {near}? expected one of {}", all.join(", "))
    }
}

/// Returns the accepted forms of a URL, as a clause.
fn expected() -> String {
    let forms = BUSES.iter().flat_map(|bus| bus.alias.iter().chain(bus.forms));
    let all: Vec<&str> = std::iter::once(&"none").chain(forms).copied().collect();
    format!("expected one of {}", all.join(", "))
}

fn find<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, text: &str) -> Option<T> {
    all.iter().copied().find(|one| name(*one) == text)
}

fn refused(text: &str, why: &str) -> Error {
    Error::new(ErrorKind::Configuration, format!("device `{text}`: {why}"))
}

//! Replies of an emulated engine.

use std::fmt::Write;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::about::{self, About};
use super::json::{Data, signed};

/// Status of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request succeeded. For a poll: the call has ended.
    Good,
    /// The request failed. For a poll: the call has not ended, or there is no call.
    Not,
    /// The control stream does not exist.
    NoControl,
    /// Another host has reset the engine that the requesting host had claimed, so the engine serves the requesting host no more. Only this project's
    /// emulator sends this, to hosts that have claimed the engine.
    Taken,
}

/// Reply of an emulated engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The status alone.
    Status(Status),
    /// A word of exchange memory.
    Register(u32),
    /// Bytes of memory.
    Memory(Vec<u8>),
    /// Self-description of this project's emulator.
    About(About),
}

#[derive(Deserialize)]
struct Fields {
    status: i64,
    rdata: Option<Data>,
    version: Option<IgnoredAny>,
}

impl Status {
    const TABLE: [(i64, Self); 4] = [(0, Self::Good), (1, Self::Not), (-1, Self::NoControl), (2, Self::Taken)];

    fn number(self) -> i64 {
        Self::TABLE.iter().find(|(_, status)| *status == self).map_or(1, |(number, _)| *number)
    }
}

impl Reply {
    /// Returns the JSON text. Bytes are signed, as the original writes them.
    pub fn to_json(&self) -> String {
        let mut text = String::new();
        let _ = match self {
            Self::Status(status) => write!(text, r#"{{"status":{}}}"#, status.number()),
            Self::Register(value) => write!(text, r#"{{"rdata":{value},"status":0}}"#),
            Self::Memory(bytes) => {
                write!(text, r#"{{"rdata":{},"status":0}}"#, signed(bytes))
            }
            Self::About(about) => return about.to_json(),
        };
        text
    }

    /// Parses the JSON text.
    ///
    /// # Errors
    /// A description of what is wrong with the text.
    pub fn from_json(text: &[u8]) -> Result<Self, String> {
        let fields: Fields = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if fields.version.is_some() {
            let fields: about::Fields = serde_json::from_slice(text).map_err(|error| error.to_string())?;
            return fields.about().map(Self::About);
        }
        let status = Status::TABLE.iter().find(|(number, _)| *number == fields.status);
        let (_, status) = status.ok_or_else(|| format!("unknown status {}", fields.status))?;
        Ok(match fields.rdata {
            Some(Data::Number(value)) if *status == Status::Good => Self::Register(value),
            Some(Data::Bytes(bytes)) if *status == Status::Good => Self::Memory(bytes),
            Some(_) | None => Self::Status(*status),
        })
    }
}

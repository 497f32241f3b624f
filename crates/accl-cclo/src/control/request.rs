//! Requests of a host to an emulated engine.

use std::fmt::Write;

use serde::Deserialize;

use super::json::{Data, unsigned};
use crate::call::{BadWord, Descriptor};

/// Request of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Reads the word at an offset of exchange memory.
    ReadRegister {
        /// Its offset in bytes.
        offset: u32,
    },
    /// Sets a word of exchange memory.
    WriteRegister {
        /// Its offset in bytes.
        offset: u32,
        /// New value of the word.
        value: u32,
    },
    /// Reads bytes of memory.
    ReadMemory {
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u32,
        /// Whether the bytes lie in host memory.
        is_host: bool,
    },
    /// Writes bytes of memory, which grows if necessary.
    WriteMemory {
        /// Address of the first byte.
        address: u64,
        /// The bytes.
        data: Vec<u8>,
        /// Whether the bytes lie in host memory.
        is_host: bool,
    },
    /// Grows memory to include this range. Memory never shrinks.
    Allocate {
        /// Address of the range, which the host chooses.
        address: u64,
        /// Length of the range in bytes.
        bytes: u32,
        /// Whether this is host memory.
        is_host: bool,
    },
    /// Starts a call. The reply does not wait for it.
    Call {
        /// Number of the control stream.
        control: u32,
        /// The call.
        call: Descriptor,
    },
    /// Asks whether the call on a control stream has ended. Each end is reported once.
    Poll {
        /// Number of the control stream.
        control: u32,
    },
    /// Asks for the emulator's self-description. Only this project's emulator answers.
    About,
    /// Claims the rank exclusively for this connection until the connection is closed. Only this project's emulator answers: with success, or with
    /// its self-description, which names the owner.
    Claim {
        /// Description of the requesting process.
        owner: String,
        /// Number of the job, shared by all its ranks and by no other job. After the next reset, packets of other jobs are dropped. Zero means that
        /// the job has no number.
        job: u32,
    },
}

/// Error for a request without a meaning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadRequest {
    /// The text is not JSON, or a field has another type.
    Json(String),
    /// No request has this type number.
    Type(u32),
    /// A field is missing.
    Missing(&'static str),
    /// A word of the call has no meaning. Firmware starts such a call all the same, and ends it with a return code.
    Call {
        /// Number of the control stream.
        control: u32,
        /// The word.
        word: BadWord,
    },
}

/// Number of a control stream that no engine has. It stands for numbers below zero and above the 32-bit range.
const NO_CONTROL: u32 = u32::MAX;

/// Type numbers of requests.
mod number {
    pub(super) const READ_REGISTER: u32 = 0;
    pub(super) const WRITE_REGISTER: u32 = 1;
    pub(super) const READ_MEMORY: u32 = 2;
    pub(super) const WRITE_MEMORY: u32 = 3;
    pub(super) const ALLOCATE: u32 = 4;
    pub(super) const CALL: u32 = 5;
    pub(super) const POLL: u32 = 6;
    pub(super) const ABOUT: u32 = 7;
    pub(super) const CLAIM: u32 = 8;
}

/// All fields that a request may have.
#[derive(Deserialize)]
struct Fields {
    r#type: u32,
    addr: Option<u64>,
    len: Option<u32>,
    host: Option<bool>,
    wdata: Option<Data>,
    ctrl_id: Option<i64>,
    scenario: Option<u32>,
    count: Option<u32>,
    comm: Option<u32>,
    root_src_dst: Option<u32>,
    function: Option<u32>,
    tag: Option<u32>,
    arithcfg: Option<u32>,
    compression_flags: Option<u32>,
    stream_flags: Option<u32>,
    addr_0: Option<u64>,
    addr_1: Option<u64>,
    addr_2: Option<u64>,
    owner: Option<String>,
    job: Option<u32>,
}

impl Request {
    /// Returns the JSON text.
    pub fn to_json(&self) -> String {
        let mut text = String::new();
        let written = match self {
            Self::ReadRegister { offset } => {
                write!(text, r#"{{"type":{},"addr":{offset}}}"#, number::READ_REGISTER)
            }
            Self::WriteRegister { offset, value } => {
                write!(text, r#"{{"type":{},"addr":{offset},"wdata":{value}}}"#, number::WRITE_REGISTER)
            }
            Self::ReadMemory { address, bytes, is_host } => {
                write!(text, r#"{{"type":{},"addr":{address},"len":{bytes},"host":{is_host}}}"#, number::READ_MEMORY)
            }
            Self::WriteMemory { address, data, is_host } => {
                let (kind, data) = (number::WRITE_MEMORY, unsigned(data));
                write!(text, r#"{{"type":{kind},"addr":{address},"wdata":{data},"host":{is_host}}}"#)
            }
            Self::Allocate { address, bytes, is_host } => {
                write!(text, r#"{{"type":{},"addr":{address},"len":{bytes},"host":{is_host}}}"#, number::ALLOCATE)
            }
            Self::Call { control, call } => write!(
                text,
                r#"{{"type":{},"ctrl_id":{control},"scenario":{},"count":{},"comm":{},"root_src_dst":{},"function":{},"tag":{},"arithcfg":{},"compression_flags":{},"stream_flags":{},"addr_0":{},"addr_1":{},"addr_2":{}}}"#,
                number::CALL,
                call.operation.number(),
                call.count,
                call.communicator,
                call.root,
                call.function,
                call.tag,
                call.arithmetic,
                call.compression.bits(),
                call.places(),
                call.first,
                call.second,
                call.result,
            ),
            Self::Poll { control } => write!(text, r#"{{"type":{},"ctrl_id":{control}}}"#, number::POLL),
            Self::About => write!(text, r#"{{"type":{}}}"#, number::ABOUT),
            Self::Claim { owner, job } => {
                let owner = serde_json::Value::from(owner.as_str());
                write!(text, r#"{{"type":{},"owner":{owner},"job":{job}}}"#, number::CLAIM)
            }
        };
        // Writing to a string cannot fail.
        let _ = written;
        text
    }

    /// Parses the JSON text.
    ///
    /// # Errors
    /// [`BadRequest`].
    pub fn from_json(text: &[u8]) -> Result<Self, BadRequest> {
        let fields: Fields = serde_json::from_slice(text).map_err(|error| BadRequest::Json(error.to_string()))?;
        let missing = BadRequest::Missing;
        let offset = || fields.addr.and_then(|at| u32::try_from(at).ok()).ok_or(missing("addr"));
        let address = || fields.addr.ok_or(missing("addr"));
        let bytes = || fields.len.ok_or(missing("len"));
        let is_host = fields.host.unwrap_or(false);
        let control = || {
            let number = fields.ctrl_id.ok_or(missing("ctrl_id"))?;
            Ok(u32::try_from(number).unwrap_or(NO_CONTROL))
        };
        Ok(match fields.r#type {
            number::READ_REGISTER => Self::ReadRegister { offset: offset()? },
            number::WRITE_REGISTER => match fields.wdata {
                Some(Data::Number(value)) => Self::WriteRegister { offset: offset()?, value },
                Some(Data::Bytes(_)) | None => return Err(missing("wdata")),
            },
            number::READ_MEMORY => Self::ReadMemory { address: address()?, bytes: bytes()?, is_host },
            number::WRITE_MEMORY => {
                let address = address()?;
                match fields.wdata {
                    Some(Data::Bytes(data)) => Self::WriteMemory { address, data, is_host },
                    Some(Data::Number(_)) | None => return Err(missing("wdata")),
                }
            }
            number::ALLOCATE => Self::Allocate { address: address()?, bytes: bytes()?, is_host },
            number::CALL => {
                let (control, call) = (control()?, fields.call()?);
                Self::Call { control, call: call.map_err(|word| BadRequest::Call { control, word })? }
            }
            number::POLL => Self::Poll { control: control()? },
            number::ABOUT => Self::About,
            number::CLAIM => {
                Self::Claim { owner: fields.owner.ok_or(missing("owner"))?, job: fields.job.unwrap_or_default() }
            }
            other => return Err(BadRequest::Type(other)),
        })
    }
}

impl Fields {
    /// Returns the call, or the word of it that has no meaning.
    fn call(&self) -> Result<Result<Descriptor, BadWord>, BadRequest> {
        let word = |value: Option<u32>, name| value.ok_or(BadRequest::Missing(name));
        let address = |value: Option<u64>, name| value.ok_or(BadRequest::Missing(name));
        let [first, second, result] =
            [address(self.addr_0, "addr_0")?, address(self.addr_1, "addr_1")?, address(self.addr_2, "addr_2")?];
        let words = [
            word(self.scenario, "scenario")?,
            word(self.count, "count")?,
            word(self.comm, "comm")?,
            word(self.root_src_dst, "root_src_dst")?,
            word(self.function, "function")?,
            word(self.tag, "tag")?,
            word(self.arithcfg, "arithcfg")?,
            word(self.compression_flags, "compression_flags")?,
            word(self.stream_flags, "stream_flags")?,
            first as u32,
            (first >> 32) as u32,
            second as u32,
            (second >> 32) as u32,
            result as u32,
            (result >> 32) as u32,
        ];
        Ok(Descriptor::from_words(&words))
    }
}

impl std::fmt::Display for BadRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Json(why) => write!(f, "a request is not valid JSON of this protocol: {why}"),
            Self::Type(number) => write!(f, "unknown request type {number}"),
            Self::Missing(field) => write!(f, "a request lacks the field `{field}`, or the field has a wrong type"),
            Self::Call { word: BadWord { name, value }, .. } => write!(f, "the {name} of a call cannot be {value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_that_no_request_can_have_are_refused() {
        for text in [
            r#"{"type":4,"addr":0,"len":1099511627776,"host":false}"#,
            r#"{"type":2,"addr":0,"len":-1,"host":false}"#,
            r#"{"type":0,"addr":4294967296}"#,
            r#"{"type":0,"addr":-4}"#,
            r#"{"type":1,"addr":0,"wdata":[1]}"#,
            r#"{"type":1,"addr":0,"wdata":4294967296}"#,
            r#"{"type":3,"addr":0,"wdata":7,"host":false}"#,
            r#"{"type":3,"addr":0,"wdata":[256],"host":false}"#,
            r#"{"type":3,"addr":18446744073709551616,"wdata":[1],"host":false}"#,
            r#"{"type":6,"ctrl_id":1e3}"#,
        ] {
            assert!(Request::from_json(text.as_bytes()).is_err(), "{text}");
        }
        assert!(Request::from_json("[".repeat(1 << 20).as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_may_come(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::from_json(&text);
            let _ = super::super::Reply::from_json(&text);
            let _ = super::super::data_from_json(&text);
        }

        #[test]
        fn any_fields_may_come(
            number in 0u32..9,
            fields in prop::collection::vec(("(owner|addr|len|host|wdata|ctrl_id|count|rdata|status|[a-z\"\\\\]{1,3})", "[-0-9eE\\[\\], \"ab.]{0,12}|true|false|null|\"[a-z \\\\]{0,9}\""), 0..6),
        ) {
            let fields: String = fields.iter().map(|(name, value)| format!(",\"{name}\":{value}")).collect();
            let text = format!("{{\"type\":{number}{fields}}}");
            if let Ok(request) = Request::from_json(text.as_bytes()) {
                prop_assert_eq!(Request::from_json(request.to_json().as_bytes()), Ok(request));
            }
            let _ = super::super::Reply::from_json(text.as_bytes());
        }
    }
}

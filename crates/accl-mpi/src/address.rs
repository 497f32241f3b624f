//! The information that one end of a link sends to the other end before the link exists.
//!
//! Owns the layout of these bytes, which has its own version.

use std::ffi::c_int;

const VERSION: u32 = 1;
/// Bytes of version, job, rank and tag.
const FIXED_BYTES: usize = 4 + 16 + 4 + 4;
/// Maximum bytes of the library's name that are sent.
const MAX_LIBRARY_BYTES: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) job: u128,
    pub(crate) rank: c_int,
    pub(crate) tag: c_int,
    pub(crate) library: String,
}

impl Address {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED_BYTES + self.library.len());
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.job.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.tag.to_le_bytes());
        bytes.extend(shortened(&self.library).as_bytes());
        bytes
    }

    /// Parses an address.
    ///
    /// # Errors
    /// A clause that states what is wrong.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Address, String> {
        let (version, rest) = bytes.split_first_chunk().ok_or("the peer's address has no version")?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(format!(
                "the peer's torch-accl-mpi has address version {version}, this process {VERSION}; install the same torch-accl-mpi everywhere"
            ));
        }
        let read = || -> Option<Address> {
            let (job, rest) = rest.split_first_chunk()?;
            let (rank, rest) = rest.split_first_chunk()?;
            let (tag, library) = rest.split_first_chunk()?;
            Some(Address {
                job: u128::from_le_bytes(*job),
                rank: c_int::from_le_bytes(*rank),
                tag: c_int::from_le_bytes(*tag),
                library: String::from_utf8_lossy(library).into_owned(),
            })
        };
        read().ok_or_else(|| "the peer's address is too short".to_owned())
    }
}

/// The library's name, cut to the length that is sent and compared.
pub(crate) fn shortened(library: &str) -> &str {
    let mut end = library.len().min(MAX_LIBRARY_BYTES);
    while !library.is_char_boundary(end) {
        end -= 1;
    }
    &library[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_back() {
        let address = Address { job: u128::MAX - 5, rank: 3, tag: 77, library: "Open MPI v4.1.4".to_owned() };
        assert_eq!(Address::from_bytes(&address.to_bytes()).unwrap(), address);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        assert!(Address::from_bytes(&[]).unwrap_err().contains("no version"));
        assert!(Address::from_bytes(&[9, 0, 0, 0, 1]).unwrap_err().contains("version 9"));
        assert!(Address::from_bytes(&[1, 0, 0, 0, 1]).unwrap_err().contains("too short"));
    }
}

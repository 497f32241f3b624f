//! The example transport in C, as another package would bring it.

use accl_transport::TransportV1;

unsafe extern "C" {
    /// Returns the table of the transport, defined in `examples/transport/datagrams.c`.
    pub(super) safe fn datagrams_transport() -> *const TransportV1;
}

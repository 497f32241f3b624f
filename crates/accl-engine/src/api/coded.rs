//! Encoded calls whose tensors lie on a device.
//!
//! Owns the choice between a worker that encodes them there and the host, which works on copies. The staging of a call says
//! whether there is a worker. Read [`Group::start_coded`] first.

use accl_executor::call::CallDesc;
use accl_types::{ErrorKind, Result};

use super::call::Call;
use super::group::Group;

impl Group {
    /// Starts a call that is not measured. If a worker can encode its tensors where they lie, the worker does.
    ///
    /// # Errors
    /// The errors of [`Group::start`].
    pub(super) fn start_coded(&self, desc: &CallDesc) -> Result<Call> {
        let Some(coder) = self.caller.tensor_coder(desc) else { return self.start(desc, None, None) };
        let coded = CallDesc { tensor_coder: Some(coder), ..desc.clone() };
        match self.start(&coded, None, None) {
            // Memory that the worker reaches is scarce. The refused call has consumed no sequence number.
            Err(error) if error.kind == ErrorKind::Exhausted => self.start(desc, None, None),
            started => started,
        }
    }
}

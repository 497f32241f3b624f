//! Encoded calls whose tensors lie on a device.
//!
//! Owns the choice between a worker that encodes them there and the host, which works on copies. The staging of a call says
//! whether there is a worker, and `Sample` adds what a measured call needs. Read [`Group::start_encoded`] first.

use std::sync::Arc;

use accl_executor::call::{CallDesc, Encoded, Encoding, MemoryKind};
use accl_executor::memory::Sample;
use accl_types::{Error, ErrorKind, Result};

use super::call::Call;
use super::group::Group;

impl Group {
    /// Starts a call that may be encoded, with the measurements that it asks for. If a worker can encode its tensors where they
    /// lie, the worker does.
    ///
    /// # Errors
    /// The errors of [`Group::start`]. `InvalidArgument` if the host has to encode, and the residuals lie elsewhere and stay there.
    pub(super) fn start_encoded(&self, desc: &CallDesc) -> Result<Call> {
        if let Some(coder) = self.caller.tensor_coder(desc) {
            let coded = CallDesc { tensor_coder: Some(coder), ..desc.clone() };
            match self.start_sampled(&coded) {
                // Memory that the worker reaches is scarce. The refused call has consumed no sequence number.
                Err(error) if error.kind == ErrorKind::Exhausted => {}
                started => return started,
            }
        }
        let moved = with_host_residuals(desc, self.caller.world).map_err(|error| error.of(desc.collective))?;
        self.start_sampled(moved.as_ref().unwrap_or(desc))
    }

    /// Like [`Group::start`], with the requested measurements of the call.
    fn start_sampled(&self, desc: &CallDesc) -> Result<Call> {
        let sampled = desc.encoding(self.caller.world).map(|encoding| Sample::with_call(desc, encoding)).transpose();
        match sampled.map_err(|error| error.of(desc.collective))?.flatten() {
            Some((desc, sample)) => self.start(&desc, Some(sample), None),
            None => self.start(desc, None, None),
        }
    }
}

/// Returns the call with residuals in host memory; `None` if they are there.
fn with_host_residuals(desc: &CallDesc, world: u32) -> Result<Option<CallDesc>> {
    let Some(encoding) = desc.encoding(world) else { return Ok(None) };
    let Some(residuals) = encoding.residuals.as_ref().filter(|residuals| residuals.memory != MemoryKind::Host) else {
        return Ok(None);
    };
    let Some(owner) = &residuals.owner else {
        return Err(Error::invalid_argument(format!(
            "the host encodes this call, but its residuals lie in {}; keep them in host memory",
            residuals.memory
        )));
    };
    let residuals = Some(Arc::new(owner.to_host()?));
    let encoding = Encoded::As(Encoding { residuals, ..encoding.clone() });
    Ok(Some(CallDesc { encoding, ..desc.clone() }))
}

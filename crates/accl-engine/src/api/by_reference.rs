//! Calls by reference: whether all ranks can make one.
//!
//! Owns the conditions that all ranks know alike. Whether the memory of the tensors allows it is decided above the engine.
//! Read [`Group::can_be_by_reference`] first.

use accl_executor::call::CallDesc;

use super::group::Group;

impl Group {
    /// Returns whether a call may be [by reference](CallDesc::is_by_reference): the host executes it, plain and unscaled. All ranks
    /// get the same answer.
    pub fn can_be_by_reference(&self, desc: &CallDesc) -> bool {
        let default = self.default_codec_of(desc);
        desc.can_be_by_reference(self.caller.world) && default.is_none() && self.route(desc, default).is_none()
    }

    /// Returns whether all ranks are on one host.
    pub fn is_on_one_host(&self) -> bool {
        self.planning.is_on_one_host()
    }
}

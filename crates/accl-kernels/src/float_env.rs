//! The floating-point mode of the calling thread. Kernels run in whichever thread makes progress, and a user may have
//! called `torch.set_flush_denormal` in one of them. Without this guard, the same sum would have other bits in that
//! thread.

/// Guard under which the thread rounds to nearest even, keeps denormals and does not trap. Dropping it restores the
/// mode.
pub(crate) struct DefaultFloatEnv {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    restore: Option<u32>,
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod mxcsr {
    use std::arch::asm;

    /// All exceptions masked, round to nearest even, no flushing.
    pub(super) const DEFAULT: u32 = 0x1f80;
    /// The six sticky exception flags, which are not part of the mode.
    pub(super) const FLAGS: u32 = 0x3f;

    pub(super) fn get() -> u32 {
        let mut value = 0u32;
        // SAFETY: stmxcsr writes four bytes to the given address, where the local `value` lies.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut value, options(nostack, preserves_flags)) };
        value
    }

    pub(super) fn set(value: u32) {
        // SAFETY: ldmxcsr reads the four bytes of the argument `value`. It came from stmxcsr or is `DEFAULT`, so no
        // reserved bit is set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &value, options(nostack, preserves_flags)) };
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl DefaultFloatEnv {
    #[inline]
    pub(crate) fn enter() -> Self {
        let current = mxcsr::get();
        if current & !mxcsr::FLAGS == mxcsr::DEFAULT {
            return Self { restore: None };
        }
        mxcsr::set(mxcsr::DEFAULT);
        Self { restore: Some(current) }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Drop for DefaultFloatEnv {
    #[inline]
    fn drop(&mut self) {
        if let Some(mode) = self.restore {
            mxcsr::set(mode);
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
impl DefaultFloatEnv {
    pub(crate) fn enter() -> Self {
        Self {}
    }
}

#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_restored_after_the_guard() {
        const FLUSH: u32 = 0x8040;
        mxcsr::set(mxcsr::DEFAULT | FLUSH);
        {
            let _env = DefaultFloatEnv::enter();
            assert_eq!(mxcsr::get() & !mxcsr::FLAGS, mxcsr::DEFAULT);
        }
        assert_eq!(mxcsr::get() & !mxcsr::FLAGS, mxcsr::DEFAULT | FLUSH);
        mxcsr::set(mxcsr::DEFAULT);
    }
}

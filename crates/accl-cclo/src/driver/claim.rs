//! Exclusive claim on a device: a device has one driver at a time.
//!
//! Owns how a driver claims a device before it changes anything, and the error if another driver has it. The bus knows the current owner and when
//! that owner has gone: see [`Bus::claim`]. Read [`claim`] first.

use std::time::Duration;

use accl_types::{Error, ErrorKind, Result};

use crate::bus::Bus;

/// How many times, and with what pause between, the driver tries to claim a device of another driver. A group that was just destroyed releases its
/// device a moment later.
const MOST_LOOKS: usize = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// Claims a device exclusively for this driver. Between tries `go_on` returns whether there is time left.
///
/// # Errors
/// Another driver has the device (the message names it, if known), or the device cannot be reached.
pub(crate) fn claim(bus: &mut dyn Bus, mut go_on: impl FnMut() -> bool) -> Result<()> {
    for look in 1.. {
        let Some(holder) = bus.claim()? else { break };
        if look == MOST_LOOKS || !go_on() {
            let text = format!(
                "{} is in use by {holder}, and a device has one driver at a time; end the other driver, give this group another device, or \
                 take the device away with `accl device reset`",
                bus.describe()
            );
            return Err(Error::new(ErrorKind::Device, text));
        }
        bus.pause(PAUSE);
    }
    Ok(())
}

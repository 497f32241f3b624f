//! A device has one driver at a time.
//!
//! Owns how a driver comes to have a device to itself before it changes anything of it, and what is said when another one has it. How a device
//! knows who that is, and when that one has gone, is its bus's: see [`Bus::claim`]. Read [`claim`] first.

use std::time::Duration;

use accl_types::{Error, ErrorKind, Result};

use crate::bus::Bus;

/// How often a device is asked for that another driver has, and the pause between: a group that was just left lets go of its own a moment later.
const MOST_LOOKS: usize = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// Takes a device for this driver alone. Between looks `go_on` is asked whether there is time left.
///
/// # Errors
/// Another driver has it, with its name as far as it is known; or the device cannot be reached.
pub(crate) fn claim(bus: &mut dyn Bus, mut go_on: impl FnMut() -> bool) -> Result<()> {
    for look in 1.. {
        let Some(holder) = bus.claim()? else { break };
        if look == MOST_LOOKS || !go_on() {
            let text = format!(
                "{} is in use by {holder}, and a device has one driver at a time; end that one, give this group another device, or take the \
                 device away from it with `accl device reset`",
                bus.describe()
            );
            return Err(Error::new(ErrorKind::Device, text));
        }
        bus.pause(PAUSE);
    }
    Ok(())
}

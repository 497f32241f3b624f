//! What benches ask of a group: the algorithm of a call, and the same blocking call many times over, timed below torch.
//!
//! A call goes the road of every blocking call, [`complete`]; what is left out is torch's dispatch.

use std::time::Instant;

use accl_engine::{CallDesc, Mode};
use accl_types::{Collective, Dtype, Error, Result};

use crate::bridge::ffi::{CallArgs, Described, Numbered, Repeated, Status};
use crate::group::{Group, call_desc, complete};
use crate::guard::{FromError, bridged};

/// Samples for which room is made before the clock starts; more are fine.
const ROOM: usize = 1 << 16;

bridged! {
    /// The code of the collective with this name.
    fn collective_code(name: &str) -> Numbered {
        let mut collectives = Collective::ALL.iter().filter(|collective| !collective.is_point_to_point());
        let found = collectives.find(|collective| collective.name() == name);
        let code = found.map(|&collective| Numbered::of(collective as i64));
        code.ok_or_else(|| Error::invalid_argument(format!("there is no collective {name}")))
    }

    /// The name of the algorithm that such a call takes. Makes no call.
    fn group_algorithm(group: &Group, args: &CallArgs) -> Described {
        let name = group.group()?.algorithm_of(&call_desc(args, Mode::Blocking)?)?;
        Ok(Described { text: name.to_owned(), status: Status::ok() })
    }

    /// Makes `samples` times `calls` blocking calls; the nanoseconds of each sample. Fenced: a barrier, which is not
    /// counted, comes before each sample.
    fn group_repeat(group: &Group, args: &CallArgs, samples: u32, calls: u32, fenced: bool) -> Repeated {
        let group = group.group()?;
        let desc = call_desc(args, Mode::Blocking)?;
        let fence = CallDesc { mode: Mode::Blocking, ..CallDesc::new(Collective::Barrier, Dtype::U8) };
        let mut nanos = Vec::with_capacity(ROOM.min(samples as usize));
        for _ in 0..samples {
            if fenced {
                must_complete(group, &fence)?;
            }
            let begun = Instant::now();
            for _ in 0..calls {
                must_complete(group, &desc)?;
            }
            nanos.push(i64::try_from(begun.elapsed().as_nanos()).unwrap_or(i64::MAX));
        }
        Ok(Repeated { nanos, status: Status::ok() })
    }
}

/// Makes one call and waits for it; an interrupt is an error.
fn must_complete(group: &accl_engine::Group, desc: &CallDesc) -> Result<()> {
    let status = complete(group, desc)?.status;
    let held = |error: Error| if status.holds_memory { error.holding_memory() } else { error };
    status.to_error().map_or(Ok(()), |error| Err(held(error)))
}

impl FromError for Repeated {
    fn from_error(error: Error) -> Self {
        Self { nanos: Vec::new(), status: Status::from_error(error) }
    }
}

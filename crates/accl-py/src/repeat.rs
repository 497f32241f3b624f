//! Functions for benchmarks: the algorithm of a call, and repeated blocking calls, timed below torch.
//!
//! A call takes the same route as every blocking call, [`complete`], except for torch's dispatch.

use std::time::Instant;

use accl_engine::{CallDesc, Mode};
use accl_types::{Collective, Dtype, Error, Result};

use crate::bridge::ffi::{CallArgs, Described, Numbered, Repeated, Status};
use crate::calls::call_desc;
use crate::group::{Group, complete};
use crate::guard::{FromError, bridged};

/// Number of samples for which memory is reserved before the clock starts; more are allowed.
const ROOM: usize = 1 << 16;

bridged! {
    /// The code of the collective with this name.
    fn collective_code(name: &str) -> Numbered {
        let mut collectives = Collective::ALL.iter().filter(|collective| !collective.is_point_to_point());
        let found = collectives.find(|collective| collective.name() == name);
        let code = found.map(|&collective| Numbered::of(collective as i64));
        code.ok_or_else(|| Error::invalid_argument(format!("unknown collective {name}")))
    }

    /// The name of the algorithm that such a call uses. Issues no call.
    fn group_algorithm(group: &Group, args: &CallArgs) -> Described {
        let name = group.group()?.algorithm_of(&call_desc(args, Mode::Blocking)?)?;
        Ok(Described { text: name.to_owned(), status: Status::ok() })
    }

    /// Issues `samples` times `calls` blocking calls; returns the nanoseconds of each sample. If `fenced`, an untimed
    /// barrier precedes each sample.
    fn group_repeat(group: &Group, args: &CallArgs, samples: u32, calls: u32, fenced: bool) -> Repeated {
        let group = group.group()?;
        let mut desc = call_desc(args, Mode::Blocking)?;
        let mut fence = CallDesc { mode: Mode::Blocking, ..CallDesc::new(Collective::Barrier, Dtype::U8) };
        let mut nanos = Vec::with_capacity(ROOM.min(samples as usize));
        for _ in 0..samples {
            if fenced {
                must_complete(group, &mut fence)?;
            }
            let begun = Instant::now();
            for _ in 0..calls {
                must_complete(group, &mut desc)?;
            }
            nanos.push(i64::try_from(begun.elapsed().as_nanos()).unwrap_or(i64::MAX));
        }
        Ok(Repeated { nanos, status: Status::ok() })
    }
}

/// Issues one call and waits for it; an interrupt is an error.
fn must_complete(group: &accl_engine::Group, desc: &mut CallDesc) -> Result<()> {
    let status = complete(group, desc)?.status;
    let held = |error: Error| if status.must_leak_memory { error.leaking_memory() } else { error };
    status.to_error().map_or(Ok(()), |error| Err(held(error)))
}

impl FromError for Repeated {
    fn from_error(error: Error) -> Self {
        Self { nanos: Vec::new(), status: Status::from_error(error) }
    }
}

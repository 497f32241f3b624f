//! The bridged function for the profiler's events. `accl-types` has the names.

use accl_types::Error;
use accl_types::config::{ProfileNames, c10d_name};

use crate::bridge::ffi::{self, Described, EventName, Status};
use crate::guard::bridged;

bridged! {
    /// The name of an event of the call with this title, in a style. `elements` is the number of the call's elements.
    fn event_name(style: ffi::ProfileNames, event: EventName, title: &str, elements: i64) -> Described {
        let style = match style {
            ffi::ProfileNames::Accl => ProfileNames::Accl,
            ffi::ProfileNames::Ccl => ProfileNames::Ccl,
            ffi::ProfileNames::Pg => ProfileNames::Pg,
            _ => return Err(Error::internal(format!("style {} of profiler names", style.repr))),
        };
        let text = match event {
            EventName::Call => style.call(title),
            EventName::Wait => style.wait(title, elements),
            EventName::Phases => ProfileNames::phases(title),
            EventName::C10d => c10d_name(title),
            _ => return Err(Error::internal(format!("event {} of the profiler", event.repr))),
        };
        Ok(Described { text, status: Status::ok() })
    }
}

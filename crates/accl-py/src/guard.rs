//! The macro that guards bridged functions: a panic becomes an internal error instead of ending the process.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use accl_types::Error;

thread_local! {
    /// The bridged function whose next call from this thread panics. Only set by tests.
    static PANIC_NEXT: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Makes the next call of the bridged function `name` from this thread panic. Returns false if there is no such
/// function.
pub(crate) fn panic_next(name: &str) -> bool {
    let found = BRIDGED.iter().copied().find(|known| *known == name);
    PANIC_NEXT.set(found);
    found.is_some()
}

/// All bridged functions that C++ calls.
pub(crate) const BRIDGED: &[&str] = &[
    "group_create",
    "group_create_sibling",
    "group_call",
    "group_submit",
    "group_spawn",
    "group_reserve",
    "group_conclude",
    "group_next_seq",
    "group_monitored_barrier",
    "group_connect_all",
    "group_abort",
    "group_shutdown",
    "group_set_timeout",
    "group_enable_timing",
    "group_first_error",
    "group_error_type",
    "group_profile_names",
    "group_describe",
    "group_snapshot",
    "group_algorithm",
    "group_repeat",
    "collective_code",
    "event_name",
    "ticket_done",
    "ticket_poll",
    "ticket_wait",
    "ticket_error",
    "ticket_held",
    "ticket_report",
    "ticket_abort",
    "ticket_seq",
    "ticket_source",
    "ticket_nanos",
    "ticket_phases",
    "ticket_when_done",
    "ticket_when_through",
];

/// A result of a bridged function that can carry an error.
pub(crate) trait FromError {
    /// Returns the value that reports `error`.
    fn from_error(error: Error) -> Self;
}

/// Runs `body`. A panic, or one that a test requested, is reported as an internal error.
pub(crate) fn guarded<T: FromError>(name: &'static str, body: impl FnOnce() -> Result<T, Error>) -> T {
    let run = AssertUnwindSafe(|| {
        if PANIC_NEXT.get() == Some(name) {
            PANIC_NEXT.set(None);
            panic!("a test asked {name} to panic");
        }
        body()
    });
    match catch_unwind(run) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => T::from_error(error),
        Err(payload) => {
            let said = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let said = said.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
            T::from_error(Error::internal(format!(
                "panic in {name}: {said}; this is a defect of torch_accl, please report it"
            )))
        }
    }
}

/// Defines bridged functions: `bridged! { fn name(arguments) -> Type { body returning Result<Type, Error> } }`.
macro_rules! bridged {
    ($($(#[$doc:meta])* fn $name:ident $(<$life:lifetime>)? ($($argument:ident: $type:ty),* $(,)?) -> $output:ty $body:block)*) => {
        $(
            $(#[$doc])*
            pub(crate) fn $name $(<$life>)? ($($argument: $type),*) -> $output {
                const _: () = assert!($crate::guard::is_listed(stringify!($name)), "add the function to BRIDGED");
                $crate::guard::guarded(stringify!($name), || $body)
            }
        )*
    };
}
pub(crate) use bridged;

/// Whether `name` is listed in [`BRIDGED`]; evaluated at compile time.
pub(crate) const fn is_listed(name: &str) -> bool {
    let mut index = 0;
    while index < BRIDGED.len() {
        if same(BRIDGED[index].as_bytes(), name.as_bytes()) {
            return true;
        }
        index += 1;
    }
    false
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

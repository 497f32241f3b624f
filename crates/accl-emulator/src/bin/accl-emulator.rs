//! Runs emulated CCLO engines behind the sockets of the ACCL project's emulator. `accl-emulator --help` describes the arguments.

use std::process::ExitCode;

fn main() -> ExitCode {
    accl_emulator::command::run("accl-emulator", std::env::args_os().skip(1)).into()
}

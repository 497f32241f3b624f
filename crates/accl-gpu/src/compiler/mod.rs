//! The vendor's compiler at run time: from CUDA C text to code for the GPU of this process.
//!
//! Owns the compiler's library, its options, the choice of a target, and the shortening of its log. Does not know the
//! driver: `gpu` loads what comes from here. The unsafe code is here: calls of foreign functions. Read `functions` and
//! [`Compiler::compile`] first.

mod functions;
mod target;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;

use accl_types::{Error, Result};

use crate::library::{Vendor, first_of};
#[cfg(test)]
pub(crate) use functions::SYMBOLS;
use functions::{Code, Functions, Program};
pub(crate) use target::Capability;

/// Name of the source in the compiler's messages.
const FILE: &CStr = c"torch-accl.cu";

/// Options that give the arithmetic of the CPU's codecs: no fused or flushed operation, and correctly rounded divisions
/// and roots.
const CUDA_OPTIONS: &[&str] = &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];
/// The same for HIP, whose compiler flushes nothing and rounds divisions and roots correctly unless asked otherwise.
const HIP_OPTIONS: &[&str] = &["--std=c++17", "-ffp-contract=off"];

/// Longest part of the compiler's log in a message, in characters.
const MOST_LOG: usize = 1500;

/// A compiler's library.
#[derive(Debug)]
pub(crate) struct Compiler {
    vendor: Vendor,
    functions: Functions,
    /// Name under which the library was opened.
    name: String,
    /// Major and minor version.
    version: (i32, i32),
}

/// Code for one target.
#[derive(Debug)]
pub(crate) struct Compiled {
    /// The code object: a cubin, or HIP's equivalent.
    pub(crate) code: Vec<u8>,
    /// Names of the kernels in the code, in the order of the names that were asked for.
    pub(crate) lowered: Vec<CString>,
    /// Warnings and, if they were asked for, the assembler's figures.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests read the assembler's figures"))]
    pub(crate) log: String,
}

impl Compiler {
    /// Opens the first candidate whose code the driver can load. Code of a newer major version than `most_major` cannot
    /// be loaded.
    ///
    /// # Errors
    /// `Device` if no candidate opens, one lacks a function, or all are too new.
    pub(crate) fn open(vendor: Vendor, candidates: &[PathBuf], most_major: i32) -> Result<Self> {
        first_of(&format!("{}'s compiler", vendor.name()), candidates, |library| {
            let functions = Functions::of(vendor, &library)?;
            let (mut major, mut minor) = (0, 0);
            // SAFETY: both arguments are integers that may be written to.
            let known = unsafe { (functions.version.call)(&mut major, &mut minor) };
            let compiler = Self { vendor, functions, name: library.name, version: (major, minor) };
            compiler.done(compiler.functions.version.name, known)?;
            if vendor == Vendor::Cuda && major > most_major {
                return Err(Error::device(format!(
                    "the driver is too old for {}: it loads code for CUDA {most_major}, and the compiler makes code for CUDA \
                     {major}.{minor}; update the driver",
                    compiler.name
                )));
            }
            Ok(compiler)
        })
    }

    /// Returns the compiler's name and version, for messages.
    pub(crate) fn title(&self) -> String {
        format!("{} ({} {}.{})", self.name, self.vendor.name(), self.version.0, self.version.1)
    }

    /// Returns the newest target of CUDA whose code runs on a device, such as `sm_90`.
    ///
    /// # Errors
    /// `Device` if the compiler knows none.
    pub(crate) fn cuda_target(&self, capability: Capability) -> Result<String> {
        let (Some(count), Some(targets)) = (self.functions.count_targets, self.functions.targets) else {
            return Err(Error::internal("HIP's compiler has no list of targets"));
        };
        let mut known = 0;
        // SAFETY: `known` is an integer that may be written to.
        self.done(count.name, unsafe { (count.call)(&mut known) })?;
        let mut list = vec![0; usize::try_from(known).unwrap_or_default()];
        // SAFETY: `list` has the number of integers that the compiler has just given.
        self.done(targets.name, unsafe { (targets.call)(list.as_mut_ptr()) })?;
        target::newest(&list, capability).ok_or_else(|| {
            Error::device(format!(
                "{} makes no code for a device of compute capability {capability}, only for {}",
                self.title(),
                target::listed(&list)
            ))
        })
    }

    /// Compiles a source. `names` are the kernels that the caller needs, as expressions in the source, such as
    /// `encode<4, float>`. `extra` are options in addition to those that fix the arithmetic.
    ///
    /// # Errors
    /// `Device` with the compiler's log if it rejects the source, or with its own words if it fails otherwise.
    pub(crate) fn compile(&self, source: &str, names: &[&str], target: &str, extra: &[&str]) -> Result<Compiled> {
        let Functions { create, add_name, compile, lowered_name, code_size, code, .. } = &self.functions;
        let source = text(source)?;
        let names = names.iter().map(|name| text(name)).collect::<Result<Vec<_>>>()?;
        let mut handle: Program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: both texts end in zero, and the program has no headers.
        let created = unsafe { (create.call)(&mut handle, source.as_ptr(), FILE.as_ptr(), 0, none, none) };
        self.done(create.name, created)?;
        let program = OpenProgram { compiler: self, handle };
        for name in &names {
            // SAFETY: the program is open and not yet compiled, and the name ends in zero.
            self.done(add_name.name, unsafe { (add_name.call)(handle, name.as_ptr()) })?;
        }
        let options = self.options(target, extra)?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = i32::try_from(pointers.len()).unwrap_or(i32::MAX);
        // SAFETY: the program is open, and `pointers` has `count` texts that end in zero.
        let compiled = unsafe { (compile.call)(handle, count, pointers.as_ptr()) };
        if let Err(error) = self.done(compile.name, compiled) {
            // A log that cannot be read does not hide the error.
            let log = program.log().unwrap_or_default();
            return Err(Error::device(format!("{} for {target}: {}", error.message, shortened(&log))));
        }
        let mut lowered = Vec::with_capacity(names.len());
        for name in &names {
            let mut found = std::ptr::null();
            // SAFETY: the program is compiled, and the name is one that it was given before.
            self.done(lowered_name.name, unsafe { (lowered_name.call)(handle, name.as_ptr(), &mut found) })?;
            if found.is_null() {
                return Err(Error::device(format!("{} names no kernel {name:?}", self.title())));
            }
            // SAFETY: the text belongs to the program, which is open, and is copied here.
            lowered.push(unsafe { CStr::from_ptr(found) }.to_owned());
        }
        let mut bytes = 0;
        // SAFETY: the program is compiled, and `bytes` may be written to.
        self.done(code_size.name, unsafe { (code_size.call)(handle, &mut bytes) })?;
        let mut object = vec![0_u8; bytes];
        // SAFETY: `object` has the number of bytes that the compiler has just given.
        self.done(code.name, unsafe { (code.call)(handle, object.as_mut_ptr().cast()) })?;
        Ok(Compiled { code: object, lowered, log: program.log()? })
    }

    /// Returns the options for a target.
    fn options(&self, target: &str, extra: &[&str]) -> Result<Vec<CString>> {
        let fixed = match self.vendor {
            Vendor::Cuda => CUDA_OPTIONS,
            Vendor::Hip => HIP_OPTIONS,
        };
        let target = format!("--gpu-architecture={target}");
        fixed.iter().copied().chain([target.as_str()]).chain(extra.iter().copied()).map(text).collect()
    }

    /// Returns an error with the compiler's words for a code other than 0.
    fn done(&self, function: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function accepts any code, and returns null or a text that is never freed.
        let words = unsafe { (self.functions.error_text.call)(code) };
        let words = if words.is_null() {
            "unknown error".into()
        } else {
            // SAFETY: the compiler has returned a text that ends in zero.
            unsafe { CStr::from_ptr(words) }.to_string_lossy()
        };
        Err(Error::device(format!("{}: {function} failed with {words} ({code})", self.title())))
    }
}

/// A program of the compiler, which is destroyed when the value is dropped.
struct OpenProgram<'a> {
    compiler: &'a Compiler,
    handle: Program,
}

impl OpenProgram<'_> {
    /// Returns the log of the compilation.
    fn log(&self) -> Result<String> {
        let Functions { log_size, log, .. } = &self.compiler.functions;
        let mut bytes = 0;
        // SAFETY: the program is open, and `bytes` may be written to.
        self.compiler.done(log_size.name, unsafe { (log_size.call)(self.handle, &mut bytes) })?;
        let mut text = vec![0_u8; bytes];
        if bytes > 0 {
            // SAFETY: `text` has the number of bytes that the compiler has just given.
            self.compiler.done(log.name, unsafe { (log.call)(self.handle, text.as_mut_ptr().cast()) })?;
        }
        Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').trim().to_owned())
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: this value alone owns the program, and nothing uses the handle afterwards. A failure cannot be reported.
        let _ = unsafe { (self.compiler.functions.destroy.call)(&mut self.handle) };
    }
}

/// Returns a C string.
fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid_argument("a source, a name or an option contains a zero byte"))
}

/// Returns the beginning of a log, and how much was left out. The first message of a compiler is the cause of the others.
fn shortened(log: &str) -> String {
    let kept: String = log.chars().take(MOST_LOG).collect();
    let left = log.chars().count() - kept.chars().count();
    match (kept.is_empty(), left) {
        (true, _) => "the compiler's log is empty".to_owned(),
        (false, 0) => kept,
        (false, _) => format!("{kept} ... ({left} more characters)"),
    }
}

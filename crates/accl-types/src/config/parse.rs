//! Parsers of setting values and their inverses. A parser's error is a clause such as ` (out of range)`, or empty.

use super::{
    AlgorithmRule, Calibration, GpuRoute, IfnameFilter, LogLevel, ProfileNames, Redirect, RedirectTo, WorkerCount,
};
use crate::{Collective, nearest, parse_cpus, parse_size, show_cpus, show_size};

const LOG_LEVELS: &[(&str, LogLevel)] = &[
    ("off", LogLevel::Off),
    ("warn", LogLevel::Warn),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
    ("trace", LogLevel::Trace),
];

pub(super) fn log_level(text: &str) -> Result<LogLevel, String> {
    LOG_LEVELS.iter().find(|(name, _)| *name == text).map(|&(_, level)| level).ok_or_else(String::new)
}

const GPU_ROUTES: &[(&str, GpuRoute)] =
    &[("auto", GpuRoute::Auto), ("peer", GpuRoute::Peer), ("staged", GpuRoute::Staged)];

pub(super) fn gpu_route(text: &str) -> Result<GpuRoute, String> {
    GPU_ROUTES.iter().find(|(name, _)| *name == text).map(|&(_, route)| route).ok_or_else(String::new)
}

pub(super) fn show_gpu_route(route: GpuRoute) -> &'static str {
    GPU_ROUTES.iter().find(|(_, known)| *known == route).map_or("", |(name, _)| name)
}

/// Only refuses white space: the ranks of a group compare the device in a text that separates settings by spaces. A
/// parser in a higher layer checks that the text names a device.
pub(super) fn device(text: &str) -> Result<String, String> {
    match text {
        "" => Ok("none".to_owned()),
        text if text.contains(char::is_whitespace) => Err(" (it contains white space)".to_owned()),
        text => Ok(text.to_owned()),
    }
}

/// Stands for every collective that no other part of the list names.
const ALL: &str = "all";

pub(super) fn redirects(text: &str) -> Result<Vec<Redirect>, String> {
    let mut named: Vec<Redirect> = Vec::new();
    let mut others: Option<RedirectTo> = None;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (name, to) = part.split_once('=').map_or((part, None), |(name, to)| (name, Some(to)));
        let to = match to {
            None => RedirectTo::Unnamed,
            Some("host") => RedirectTo::Host,
            Some(offload) if is_name(offload) => RedirectTo::Offload(offload.to_owned()),
            Some(other) => return Err(format!(" (`{other}` cannot run collectives)")),
        };
        let is_again = if name == ALL {
            others.replace(to).is_some()
        } else {
            let known = Collective::ALL.iter().map(|collective| collective.name()).chain([ALL]);
            let collective = Collective::ALL.iter().find(|collective| collective.name() == name).ok_or_else(|| {
                let hint = nearest(name, known).map(|near| format!("; did you mean {near}?")).unwrap_or_default();
                format!(" (`{name}` is not a collective{hint})")
            })?;
            if matches!(to, RedirectTo::Offload(_)) && !moves_blocks(*collective) {
                return Err(format!(" (`{part}`: every {name} runs on the host)"));
            }
            let is_again = named.iter().any(|known| known.collective == *collective);
            named.push(Redirect { collective: *collective, to });
            is_again
        };
        if is_again {
            return Err(format!(" (`{name}` is listed twice)"));
        }
    }
    if let Some(to) = others {
        let rest = Collective::ALL.iter().filter(|collective| moves_blocks(**collective));
        let rest = rest.filter(|collective| named.iter().all(|known| known.collective != **collective));
        let rest: Vec<_> = rest.map(|&collective| Redirect { collective, to: to.clone() }).collect();
        named.extend(rest);
    }
    named.sort_unstable_by_key(|redirect| redirect.collective as u8);
    Ok(named)
}

/// Whether the collective moves blocks between all ranks.
fn moves_blocks(collective: Collective) -> bool {
    !collective.is_point_to_point() && collective != Collective::Barrier
}

/// Whether this can be the name of a kind of offload.
fn is_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_lowercase())
        && text.chars().all(|each| each.is_ascii_lowercase() || each.is_ascii_digit() || matches!(each, '_' | '-'))
}

pub(super) fn show_redirects(all: &[Redirect]) -> String {
    let show = |Redirect { collective, to }: &Redirect| match to {
        RedirectTo::Unnamed => collective.name().to_owned(),
        RedirectTo::Host => format!("{collective}=host"),
        RedirectTo::Offload(name) => format!("{collective}={name}"),
    };
    all.iter().map(show).collect::<Vec<_>>().join(",")
}

pub(super) fn compress_all(text: &str) -> Result<bool, String> {
    match text {
        "hooks" => Ok(false),
        "all" => Ok(true),
        _ => Err(String::new()),
    }
}

pub(super) fn show_compress_all(all: bool) -> &'static str {
    if all { "all" } else { "hooks" }
}

pub(super) fn show_log_level(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Off => "off",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
        LogLevel::Trace => "trace",
    }
}

pub(super) fn profile_names(text: &str) -> Result<ProfileNames, String> {
    match text {
        "accl" => Ok(ProfileNames::Accl),
        "ccl" => Ok(ProfileNames::Ccl),
        "pg" => Ok(ProfileNames::Pg),
        _ => Err(String::new()),
    }
}

pub(super) fn show_profile_names(names: ProfileNames) -> &'static str {
    match names {
        ProfileNames::Accl => "accl",
        ProfileNames::Ccl => "ccl",
        ProfileNames::Pg => "pg",
    }
}

pub(super) fn ifname_filter(text: &str) -> IfnameFilter {
    let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
    let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
    let names = text.split(',').map(str::trim).filter(|n| !n.is_empty()).map(str::to_owned).collect();
    IfnameFilter { names, exact, exclude }
}

pub(super) fn show_ifname_filter(filter: &IfnameFilter) -> String {
    let marks = [(filter.exclude, "^"), (filter.exact, "=")];
    let marks: String = marks.iter().filter(|(set, _)| *set).map(|(_, mark)| *mark).collect();
    marks + &filter.names.join(",")
}

pub(super) fn port_range(text: &str) -> Result<Option<(u16, u16)>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let port =
        |t: &str| t.trim().parse::<u16>().ok().filter(|&p| p > 0).ok_or_else(|| format!(" (`{t}` is not a port)"));
    let (first, last) = (port(first)?, port(last)?);
    if first > last { Err(" (the first port is above the last)".into()) } else { Ok(Some((first, last))) }
}

/// A list of names. The owners of the named things check whether each name exists.
pub(super) fn names(text: &str) -> Result<Vec<String>, String> {
    let names: Vec<String> = text.split(',').map(str::trim).filter(|n| !n.is_empty()).map(str::to_owned).collect();
    if names.is_empty() {
        return Err(" (the list is empty)".into());
    }
    for (i, name) in names.iter().enumerate() {
        if !name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_') {
            return Err(format!(" (`{name}` is not a valid name)"));
        }
        if names[..i].contains(name) {
            return Err(format!(" (`{name}` is listed twice)"));
        }
    }
    Ok(names)
}

pub(super) fn size(text: &str, min: u64, max: u64) -> Result<u64, String> {
    let bytes = parse_size(text).ok_or_else(|| " (it is not a size)".to_owned())?;
    if (min..=max).contains(&bytes) { Ok(bytes) } else { Err(" (out of range)".into()) }
}

pub(super) fn spin(text: &str) -> Result<Option<u64>, String> {
    if text == "auto" {
        return Ok(None);
    }
    text.parse::<u64>().ok().filter(|us| *us <= 1_000_000).map(Some).ok_or_else(String::new)
}

/// Maximum number of worker threads, in addition to the caller's thread.
const MOST_WORKERS: u32 = 63;

pub(super) fn worker_count(text: &str) -> Result<WorkerCount, String> {
    if text == "auto" {
        return Ok(WorkerCount::Auto);
    }
    text.parse().ok().filter(|count| *count <= MOST_WORKERS).map(WorkerCount::Exactly).ok_or_else(String::new)
}

pub(super) fn show_worker_count(count: WorkerCount) -> String {
    match count {
        WorkerCount::Exactly(count) => count.to_string(),
        WorkerCount::Auto => "auto".to_owned(),
    }
}

/// Returns the CPUs, or an empty list for `auto`.
pub(super) fn worker_affinity(text: &str) -> Result<Vec<u32>, String> {
    if text == "auto" {
        return Ok(Vec::new());
    }
    let cpus = parse_cpus(text).filter(|cpus| !cpus.is_empty()).ok_or_else(String::new)?;
    let mut sorted = cpus.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!(" (CPU {} is listed twice)", pair[0])),
        None => Ok(cpus),
    }
}

pub(super) fn show_worker_affinity(cpus: &[u32]) -> String {
    if cpus.is_empty() { "auto".to_owned() } else { show_cpus(cpus) }
}

pub(super) fn flag(text: &str) -> Result<bool, String> {
    match text {
        "0" | "false" | "off" | "no" => Ok(false),
        "1" | "true" | "on" | "yes" => Ok(true),
        _ => Err(String::new()),
    }
}

pub(super) fn calibration(text: &str) -> Result<Calibration, String> {
    match text {
        "auto" => Ok(Calibration::Auto),
        "off" => Ok(Calibration::Off),
        // A path must contain a slash; otherwise a mistyped word would become a file.
        path if path.contains('/') => Ok(Calibration::File(path.to_owned())),
        _ => Err(String::new()),
    }
}

pub(super) fn show_calibration(calibration: &Calibration) -> &str {
    match calibration {
        Calibration::Auto => "auto",
        Calibration::Off => "off",
        Calibration::File(path) => path,
    }
}

pub(super) fn algorithm_rules(text: &str) -> Result<Vec<AlgorithmRule>, String> {
    text.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(algorithm_rule).collect()
}

fn algorithm_rule(text: &str) -> Result<AlgorithmRule, String> {
    let (collective, rest) = text.split_once('=').ok_or_else(|| format!(" (`{text}` has no `=`)"))?;
    let kinds = || Collective::ALL.iter().filter(|c| !c.is_point_to_point());
    let collective = kinds().find(|c| c.name() == collective).copied().ok_or_else(|| {
        let hint = nearest(collective, kinds().map(|c| c.name()));
        let hint = hint.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
        format!(" (`{collective}` is not a collective{hint})")
    })?;
    let (algorithm, range) = rest.split_once(':').unwrap_or((rest, "-"));
    if algorithm.is_empty() {
        return Err(format!(" (`{text}` names no algorithm)"));
    }
    let (min, max) = range.split_once('-').ok_or_else(|| format!(" (`{range}` is not a range)"))?;
    let bound = |t: &str, open: u64| if t.is_empty() { Ok(open) } else { size(t, 0, u64::MAX) };
    Ok(AlgorithmRule {
        collective,
        algorithm: algorithm.to_owned(),
        min_bytes: bound(min, 0)?,
        max_bytes: bound(max, u64::MAX)?,
    })
}

pub(super) fn show_algorithm_rules(rules: &[AlgorithmRule]) -> String {
    let show = |rule: &AlgorithmRule| {
        let open = |bytes: u64, open: u64| if bytes == open { String::new() } else { show_size(bytes) };
        let range = match (open(rule.min_bytes, 0), open(rule.max_bytes, u64::MAX)) {
            (min, max) if min.is_empty() && max.is_empty() => String::new(),
            (min, max) => format!(":{min}-{max}"),
        };
        format!("{}={}{range}", rule.collective, rule.algorithm)
    };
    rules.iter().map(show).collect::<Vec<_>>().join(",")
}

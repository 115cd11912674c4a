//! What `/tether/status` tells.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use super::history::Point;
use super::now;
use crate::app::App;
use crate::metrics::{Abort, Class, Label, Mismatch, Phase, Refusal, Retry, Route, UpstreamOutcome};

/// A disk that does not answer in this time is told as unknown: the page must not hang with it.
const DISK_TIMEOUT: Duration = Duration::from_secs(1);

/// The counters now.
pub(super) fn point(app: &App) -> Point {
    Point {
        time: now(),
        answered: answered(app, Class::ALL),
        tokens: app.metrics.prompt_tokens.get(),
        failed: failed(app),
        in_flight: app.metrics.in_flight.get(),
    }
}

/// How things stand, with the history after `since`.
pub(super) async fn status(app: &Arc<App>, since: f64) -> Value {
    let metrics = &app.metrics;
    let upstreams: Vec<Value> = app
        .upstreams
        .all()
        .iter()
        .map(|upstream| {
            let outcomes = |outcome: UpstreamOutcome| upstream.metrics.requests.at(outcome).get();
            let failed = UpstreamOutcome::ALL.iter().filter(|&&outcome| outcome != UpstreamOutcome::Replied);
            json!({
                "url": upstream.url(),
                "up": upstream.metrics.up.get() == 1,
                "in_flight": upstream.metrics.in_flight.get(),
                "tokens": upstream.metrics.tokens_in_flight.get(),
                "replied": outcomes(UpstreamOutcome::Replied),
                "failed": failed.map(|&outcome| outcomes(outcome)).sum::<u64>(),
            })
        })
        .collect();
    let held: i64 = app.upstreams.all().iter().map(|upstream| upstream.metrics.in_flight.get()).sum();
    let points: Vec<Value> = app
        .page
        .history
        .after(since)
        .iter()
        .map(|p| json!([p.time, p.answered, p.tokens, p.failed, p.in_flight]))
        .collect();
    let phases = Phase::ALL.iter().map(|&phase| metrics.client_gone.at(phase).get());
    let refusals = Refusal::ALL.iter().map(|&reason| metrics.refused.at(reason).get());
    let mismatches = Mismatch::ALL.iter().map(|&reason| metrics.mismatches.at(reason).get());
    let retries = Retry::ALL.iter().map(|&reason| metrics.retries.at(reason).get());
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "now": now(),
        "started": app.page.started,
        "draining": app.is_draining(),
        "in_flight": metrics.in_flight.get(),
        "held": held,
        // In flight and not with an upstream: being read, or waiting for a dump.
        "waiting": (metrics.in_flight.get() - held).max(0),
        "oldest_seconds": metrics.oldest.seconds(),
        "connections": metrics.connections.get(),
        "answered": answered(app, &[Class::Success, Class::Redirect]),
        "client_errors": answered(app, &[Class::ClientError]),
        "failed": failed(app),
        "refused": refusals.sum::<u64>(),
        "client_gone": phases.sum::<u64>(),
        "mismatches": mismatches.sum::<u64>(),
        "retries": retries.sum::<u64>(),
        "prompt_tokens": metrics.prompt_tokens.get(),
        "body_memory": { "used": metrics.body_memory.get(), "limit": app.args.body_memory.0 },
        "upstreams": upstreams,
        "disks": disks(app).await,
        "errors": app.page.errors.all(),
        "history": points,
    })
}

fn answered(app: &App, classes: &[Class]) -> u64 {
    let pairs = Route::ALL.iter().flat_map(|&route| classes.iter().map(move |&class| (route, class)));
    pairs.map(|(route, class)| app.metrics.answered.at(route, class).get()).sum()
}

/// Requests that ended badly, through no doing of their client's.
fn failed(app: &App) -> u64 {
    let reasons = Abort::ALL.iter().filter(|&&reason| reason != Abort::ClientGone);
    let cut = reasons.flat_map(|&reason| Route::ALL.iter().map(move |&route| (route, reason)));
    answered(app, &[Class::ServerError])
        + cut.map(|(route, reason)| app.metrics.aborted.at(route, reason).get()).sum::<u64>()
}

/// Room on the disks of the dump directories.
async fn disks(app: &App) -> Vec<Value> {
    if app.dump_dirs.is_empty() {
        return Vec::new();
    }
    // One look at a time: each that hangs holds a thread.
    if app.page.looking.swap(true, Ordering::Acquire) {
        return app.dump_dirs.iter().map(|dir| disk(dir, None)).collect();
    }
    let (dirs, looking) = (app.dump_dirs.clone(), Arc::clone(&app.page.looking));
    let look = tokio::task::spawn_blocking(move || {
        let found = dirs.iter().map(|dir| disk(dir, rustix::fs::statvfs(&**dir).ok())).collect();
        looking.store(false, Ordering::Release);
        found
    });
    match tokio::time::timeout(DISK_TIMEOUT, look).await {
        Ok(Ok(found)) => found,
        _ => app.dump_dirs.iter().map(|dir| disk(dir, None)).collect(),
    }
}

fn disk(dir: &Path, stat: Option<rustix::fs::StatVfs>) -> Value {
    let bytes = stat.map(|s| (s.f_bavail.saturating_mul(s.f_frsize), s.f_blocks.saturating_mul(s.f_frsize)));
    json!({ "dir": dir.display().to_string(), "free": bytes.map(|b| b.0), "total": bytes.map(|b| b.1) })
}

//! Accepts connections until told to stop, then lets requests end.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::app::App;
use crate::client_io::{ClientIo, Connection};
use crate::orphans::Sweeper;
use crate::reply::ReplyBody;
use crate::upstream::{self, Upstream};
use crate::{own, service};

/// Most bytes in the head of a request; more is answered with 431.
const MAX_HEAD: usize = 64 << 10;

/// Most header lines of a request; more is answered with 431.
const MAX_HEADERS: usize = 256;

/// How long a connection may be silent before the kernel asks whether the client is still there. Idle connections are
/// kept as long as it is.
const PROBE_AFTER: Duration = Duration::from_secs(60);

/// How often connections to upstreams are looked at for those that were idle for too long, and the status page's history
/// gets a point.
const TIDY: Duration = Duration::from_secs(1);

/// What connections are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Go,
    /// End after the present request.
    Drain,
    /// End now.
    Cut,
}

/// Serves clients on `listener`, and metrics on `metrics` if given, until the first `signal`; then drains. A second signal
/// ends the draining at once.
pub async fn serve(
    app: Arc<App>,
    sweeper: Sweeper,
    listener: TcpListener,
    metrics: Option<TcpListener>,
    mut signals: mpsc::Receiver<()>,
) {
    let (orders, order) = watch::channel(Order::Go);
    let sweeper = tokio::spawn(sweeper.run());
    let tidy = tokio::spawn(tidy(app.clone()));
    let checks = tokio::spawn(check_health(app.clone()));
    let metrics = metrics.map(|listener| tokio::spawn(serve_metrics(app.clone(), listener, order.clone())));

    tokio::select! {
        () = accept(&app, &listener, &order) => {}
        _ = signals.recv() => {}
    }
    app.drain();
    info!(settle_s = app.args.settle.0.as_secs_f64(), in_flight = app.metrics.in_flight.get(), "draining");
    let mut hurried = false;
    if !app.args.settle.0.is_zero() {
        tokio::select! {
            () = accept(&app, &listener, &order) => {}
            _ = signals.recv() => hurried = true,
            () = tokio::time::sleep(app.args.settle.0) => {}
        }
    }
    drop(listener);
    drop(order);
    // Nobody may be listening any more, and then nothing is to be done.
    let _ = orders.send(Order::Drain);
    let deadline = Instant::now() + app.args.drain_timeout.0;
    tokio::select! {
        () = quiet(&app) => {}
        _ = signals.recv(), if !hurried => {}
        () = tokio::time::sleep_until(deadline), if !hurried => {}
        () = std::future::ready(()), if hurried => {}
    }
    let left = app.metrics.in_flight.get();
    if left > 0 {
        warn!(requests = left, "gave up waiting, cutting the requests that are left");
    }
    app.cut();
    let _ = orders.send(Order::Cut);
    // Each connection's task ends within moments of the order.
    let _ = tokio::time::timeout(Duration::from_secs(5), quiet(&app)).await;
    if let Some(metrics) = metrics {
        metrics.abort();
    }
    tidy.abort();
    checks.abort();
    sweeper.abort();
    let orphans = app.orphans.clone();
    if tokio::task::spawn_blocking(move || orphans.sweep()).await.is_err() {
        warn!("the last sweep for undelivered dumps failed");
    }
    info!("stopped");
}

/// Until no client is connected. Connections end after their request once they were told to drain.
async fn quiet(app: &App) {
    while app.metrics.connections.get() > 0 || app.metrics.in_flight.get() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn tidy(app: Arc<App>) {
    loop {
        tokio::time::sleep(TIDY).await;
        app.upstreams.all().iter().for_each(|upstream| upstream.pool.close_idle());
        app.page.sample(&app);
    }
}

/// Asks each upstream for its health, at the interval that is set.
async fn check_health(app: Arc<App>) {
    let args = &app.args;
    if args.health_interval.0.is_zero() {
        return;
    }
    let of_one = |upstream: &Arc<Upstream>| {
        let upstream = upstream.clone();
        async move {
            loop {
                // Many proxies that start together must not ask together.
                tokio::time::sleep(args.health_interval.0.mul_f64(1.0 + rand::random_range(0.0..0.1))).await;
                let result = upstream::check(&upstream, &args.health_path, args.health_timeout.0).await;
                upstream.checked(&result);
            }
        }
    };
    futures_util::future::join_all(app.upstreams.all().iter().map(of_one)).await;
}

async fn accept(app: &Arc<App>, listener: &TcpListener, order: &watch::Receiver<Order>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, most likely: those in use will be given back.
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        if let Err(error) = prepare(&stream) {
            debug!(%error, "connection ended before it began");
            continue;
        }
        app.metrics.connections_accepted.inc();
        let open = Open::new(app);
        tokio::spawn(client(app.clone(), stream, order.clone(), open));
    }
}

/// Counts a connection as open until dropped.
struct Open(Arc<App>);

impl Open {
    fn new(app: &Arc<App>) -> Self {
        app.metrics.connections.inc();
        Self(app.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.metrics.connections.dec();
    }
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    // An event must not wait for the acknowledgement of the one before.
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_AFTER / 4);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// One client connection. `open` is dropped last, when the requests of the connection have ended.
async fn client(app: Arc<App>, stream: TcpStream, mut order: watch::Receiver<Order>, open: Open) {
    let state = Connection::default();
    let io = TokioIo::new(ClientIo::new(stream, state.clone(), app.args.client_timeout.0));
    let service = service_fn(move |request| {
        let (app, turn) = (app.clone(), state.turn());
        async move { Ok::<_, Infallible>(service::handle(&app, request, turn).await) }
    });
    let mut connection = std::pin::pin!(builder().serve_connection(io, service));
    loop {
        let now = *order.borrow_and_update();
        match now {
            Order::Go => {}
            Order::Drain => connection.as_mut().graceful_shutdown(),
            Order::Cut => break,
        }
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    debug!(error = crate::gate::error_chain(&error), "client connection ended");
                }
                break;
            }
            changed = order.changed() => if changed.is_err() { break },
        }
    }
    drop(open);
}

fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    // The limit on heads is in `ClientIo`.
    builder.header_read_timeout(None).max_header_size(MAX_HEAD).max_headers(MAX_HEADERS);
    builder
}

async fn serve_metrics(app: Arc<App>, listener: TcpListener, order: watch::Receiver<Order>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (app, mut order) = (app.clone(), order.clone());
        tokio::spawn(async move {
            let state = Connection::default();
            let io = TokioIo::new(ClientIo::new(stream, state.clone(), app.args.client_timeout.0));
            let service = service_fn(move |request| {
                let (app, turn) = (app.clone(), state.turn());
                async move {
                    let reply = own::answer_on_metrics(&app, &request).await;
                    Ok::<_, Infallible>(reply.map(|kind| ReplyBody::new(kind, None, turn)))
                }
            });
            tokio::select! {
                result = builder().serve_connection(io, service) => {
                    if let Err(error) = result {
                        debug!(%error, "metrics connection ended");
                    }
                }
                _ = order.wait_for(|order| *order == Order::Cut) => {}
            }
        });
    }
}

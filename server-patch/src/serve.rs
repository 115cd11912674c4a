//! The listener: accepts connections until told to stop, then lets what is in flight end.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::App;

/// Longest time for a request's head, and for a kept connection without one. Longer than proxies keep theirs idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(90);
/// After an accept failed for want of file handles or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Calls that were cut because they did not end in time.
    pub cut: usize,
}

/// Serves `app` on `listener` until `shutdown`; then takes no new work, lets calls in flight end, and gives up after
/// `drain_timeout`.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    shutdown: impl Future<Output = ()> + Send,
    drain_timeout: Duration,
) -> Drained {
    let (closing, _) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut accept = async |until: &mut (dyn Future<Output = ()> + Send + Unpin)| {
        loop {
            tokio::select! {
                () = &mut *until => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(connection(stream, Arc::clone(&app), closing.subscribe()));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                // Joined as they end, or the set would grow with every connection.
                Some(_) = connections.join_next() => {}
            }
        }
    };
    accept(&mut pin!(shutdown)).await;

    app.lifecycle.drain();
    app.metrics.ready.set(0);
    tracing::info!(in_flight = app.lifecycle.in_flight(), "draining");
    let deadline = tokio::time::Instant::now() + drain_timeout;
    // New requests are still answered meanwhile, with 503.
    let idle = async {
        let _in_time = tokio::time::timeout_at(deadline, app.lifecycle.idle()).await;
    };
    accept(&mut pin!(idle)).await;
    let cut = app.lifecycle.in_flight();
    if cut > 0 {
        tracing::warn!(cut, "the drain time-out is over; requests in flight are cut");
        app.engine.close();
        connections.shutdown().await;
        return Drained { cut };
    }
    // Nobody is left to hear this if there are no connections.
    let _ = closing.send(true);
    let ended =
        tokio::time::timeout_at(deadline.max(tokio::time::Instant::now() + Duration::from_secs(1)), async {
            while connections.join_next().await.is_some() {}
        });
    if ended.await.is_err() {
        connections.shutdown().await;
    }
    Drained { cut: 0 }
}

async fn connection(stream: TcpStream, app: Arc<App>, mut closing: watch::Receiver<bool>) {
    // Replies are small and wait for nothing.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let service = service_fn(move |request| {
        let app = Arc::clone(&app);
        async move { Ok::<_, Infallible>(app.handle(request).await) }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
    );
    let told = async {
        // An error means that the server is gone, which is as good a reason.
        let _ = closing.wait_for(|closing| *closing).await.is_ok();
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        () = told => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke off");
    }
}

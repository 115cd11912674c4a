//! The status page at `/tether/`: what the proxy is doing, for those who have no Grafana at hand.
//!
//! The page is one embedded file without anything from elsewhere. It asks `/tether/status` once a second, which tells how
//! things stand, the last errors, and a history of the last half hour.

mod errors;
mod history;
mod status;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{SystemTime, UNIX_EPOCH};

use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderName, HeaderValue, Response, StatusCode};

use crate::app::App;
use crate::error::json_response;
pub use errors::{RecentError, RecentErrors};
use history::History;

const HTML: &str = include_str!("page/page.html");

/// Nothing is loaded from anywhere, and the page is shown in nobody's frame.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What the page knows beyond the metrics.
#[derive(Debug)]
pub struct Page {
    /// What went wrong last.
    pub errors: RecentErrors,
    history: History,
    started: f64,
    /// Whether somebody looks at the disks now.
    looking: Arc<AtomicBool>,
}

impl Default for Page {
    fn default() -> Self {
        Self {
            errors: RecentErrors::default(),
            history: History::default(),
            started: now(),
            looking: Arc::default(),
        }
    }
}

impl Page {
    /// Takes one point of the history; called once a second.
    pub fn sample(&self, app: &App) {
        self.history.push(status::point(app));
    }

    /// The page itself.
    pub fn html() -> Response<String> {
        let mut response = Response::new(HTML.to_owned());
        let headers: [(HeaderName, &'static str); 5] = [
            (CONTENT_TYPE, "text/html; charset=utf-8"),
            (CONTENT_SECURITY_POLICY, POLICY),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (REFERRER_POLICY, "no-referrer"),
            (CACHE_CONTROL, "no-store"),
        ];
        for (name, value) in headers {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }

    /// What the page shows. `query` may hold `since`, the time of the last point of the history that is known already.
    pub async fn status(app: &Arc<App>, query: Option<&str>) -> Response<String> {
        let since =
            query.into_iter().flat_map(|query| query.split('&')).find_map(|pair| pair.strip_prefix("since="));
        let since = match since.map(str::parse::<f64>) {
            None => 0.0,
            Some(Ok(since)) => since,
            Some(Err(_)) => {
                let message = format!("since={} is not a Unix time", since.unwrap_or_default());
                let error = serde_json::json!({ "error": { "message": message, "code": 400 } });
                return json_response(StatusCode::BAD_REQUEST, &error);
            }
        };
        let mut response = json_response(StatusCode::OK, &status::status(app, since).await);
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

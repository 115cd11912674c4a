use tether_dump::{RequestId, dump_path};

use crate::support::{Proxy, Upstream, dumps, publish};

#[tokio::test]
async fn clients_without_the_directory_read_and_delete_dumps_over_http() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dumps");
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--dump-dir", dir.to_str().unwrap()]).await;
    let id = RequestId::new();
    let tokens: Vec<i64> = (0..50_000).collect();
    publish(&dir, id, id, &tokens);
    let bytes = std::fs::read(dump_path(&dir, id)).unwrap();

    let path = format!("/tether/dumps/{id}");
    let reply = proxy.get(&path).await;
    assert_eq!((reply.status(), reply.header("content-length")), (200, Some(&*bytes.len().to_string())));
    assert!(reply.body == bytes, "the dump came changed");
    assert_eq!(proxy.request("DELETE", &path).await.status(), 200);
    assert_eq!(dumps(&dir), 0);
    assert_eq!(proxy.request("DELETE", &path).await.status(), 404);
    assert_eq!(proxy.get(&path).await.status(), 404);
    assert_eq!(proxy.request("PUT", &path).await.status(), 405);
    for bad in ["..%2f..%2fetc%2fpasswd", "../../etc/passwd", &id.to_string().to_uppercase(), ""] {
        assert_eq!(proxy.get(&format!("/tether/dumps/{bad}")).await.status(), 400, "{bad}");
    }
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn a_dump_that_is_a_folder_is_read_over_http_file_by_file() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dumps");
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--dump-dir", dir.to_str().unwrap()]).await;
    let id = RequestId::new();
    let (path, folder) = (format!("/tether/dumps/{id}"), dir.join(format!("req_{id}")));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("aux_0.pt"), b"states").unwrap();
    std::fs::write(dir.join("secret"), b"not a dump").unwrap();
    assert_eq!(proxy.get(&path).await.status(), 404, "it is not whole yet");
    std::fs::write(folder.join("done"), b"").unwrap();
    assert_eq!(proxy.get(&path).await.json(), serde_json::json!({"files": ["aux_0.pt", "done"]}));
    let file = proxy.get(&format!("{path}/aux_0.pt")).await;
    assert_eq!((file.status(), &*file.body), (200, &b"states"[..]));
    for name in ["aux_1.pt", "../secret", "..%2fsecret", "", "/etc/passwd"] {
        let reply = proxy.get(&format!("{path}/{name}")).await;
        assert_eq!(reply.status(), 404, "{name}");
    }
    assert_eq!(proxy.request("DELETE", &format!("{path}/aux_0.pt")).await.status(), 400);
    assert_eq!(proxy.request("DELETE", &path).await.status(), 200);
    assert!(!folder.exists() && dir.join("secret").exists());
}

//! Gives this package's tests and binaries a run path to the libtorch that torch-sys was built against, so that
//! they start without `LD_LIBRARY_PATH`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // `links = "tch"` in torch-sys: its `cargo:libtorch_lib` reaches direct dependents under this name.
    println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    match std::env::var("DEP_TCH_LIBTORCH_LIB") {
        Ok(lib) => println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}"),
        Err(_) => {
            println!("cargo:warning=torch-sys did not say where libtorch is; set LD_LIBRARY_PATH to run");
        }
    }
}

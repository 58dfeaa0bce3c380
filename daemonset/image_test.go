package daemonset_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/test/harness"
)

// sources copies the files of the repository to a directory of its own, so that
// what is built there leaves bin alone and stands at another path each time.
func sources(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("git", "-C", "..", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join("..", name))
		if errors.Is(err, fs.ErrNotExist) { // removed, and not yet committed
			continue
		}
		info, err2 := os.Stat(filepath.Join("..", name))
		if err = errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, info.Mode().Perm()); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// builtImage runs a make target in a copy of the sources and returns what the
// archive holds, by name, the archive and what make printed last.
func builtImage(t *testing.T, umask, target, archive string, vars ...string) (files map[string][]byte, raw []byte, said string) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: no image is built")
	}
	dir := sources(t)
	cmd := exec.Command("sh", append([]string{"-c", "umask " + umask + `; exec make -s "$@"`, "sh", target}, vars...)...)
	cmd.Dir = dir
	// Flags of the make that runs these tests are not for that one.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "MAKE") || strings.HasPrefix(e, "MFLAGS") })
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("make %s: %v\n%s", target, err, out)
	}
	if raw, err = os.ReadFile(filepath.Join(dir, archive)); err != nil {
		t.Fatal(err)
	}
	return unpacked(t, bytes.NewReader(raw)), raw, strings.TrimSpace(string(out))
}

func unpacked(t *testing.T, r io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(in); err != nil {
			t.Fatal(err)
		}
	}
}

// descriptor is what OCI's documents call a blob by.
type descriptor struct {
	MediaType   string
	Digest      string
	Size        int64
	Annotations map[string]string
}

// blob returns what a descriptor names, if it is of that digest and size.
func blob(t *testing.T, files map[string][]byte, d descriptor) []byte {
	t.Helper()
	content, ok := files["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
	sum := sha256.Sum256(content)
	if !ok || d.Digest != "sha256:"+hex.EncodeToString(sum[:]) || d.Size != int64(len(content)) {
		t.Fatalf("%+v: there %v, %d bytes of sha256:%x", d, ok, len(content), sum)
	}
	return content
}

func decode(t *testing.T, text []byte, v any) {
	t.Helper()
	if err := json.Unmarshal(text, v); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}

// parts of an image that has one layer, by the OCI image layout; Docker's
// manifest.json beside it must say the same.
func parts(t *testing.T, files map[string][]byte, name string) (digest string, config imageConfig, layer []byte) {
	t.Helper()
	var version struct{ ImageLayoutVersion string }
	decode(t, files["oci-layout"], &version)
	var index struct{ Manifests []descriptor }
	decode(t, files["index.json"], &index)
	if version.ImageLayoutVersion != "1.0.0" || len(index.Manifests) != 1 {
		t.Fatalf("layout %q with %d manifests", version.ImageLayoutVersion, len(index.Manifests))
	}
	at := index.Manifests[0]
	if got := at.Annotations["io.containerd.image.name"]; got != "docker.io/library/"+name {
		t.Errorf("containerd would call it %q, and the kubelet asks for docker.io/library/%s", got, name)
	}
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	decode(t, blob(t, files, at), &manifest)
	if len(manifest.Layers) != 1 {
		t.Fatalf("%d layers, want 1", len(manifest.Layers))
	}
	decode(t, blob(t, files, manifest.Config), &config)
	layer = blob(t, files, manifest.Layers[0])
	path := func(d descriptor) string { return "blobs/" + strings.Replace(d.Digest, ":", "/", 1) }
	want := []dockerImage{{Config: path(manifest.Config), RepoTags: []string{name}, Layers: []string{path(manifest.Layers[0])}}}
	var docker []dockerImage
	decode(t, files["manifest.json"], &docker)
	if fmt.Sprint(docker) != fmt.Sprint(want) {
		t.Errorf("docker load would take %v, want %v", docker, want)
	}
	return at.Digest, config, layer
}

type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

type imageConfig struct {
	OS, Architecture string
	Created          string
	Config           struct {
		Entrypoint, Cmd []string
		Labels          map[string]string
		User            string
	}
}

// extract writes a layer below dir and returns the headers in it.
func extract(t *testing.T, layer []byte, dir string) []tar.Header {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(layer))
	if err != nil {
		t.Fatal(err)
	}
	var list []tar.Header
	for in := tar.NewReader(z); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, *h)
		at := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(at, 0o755)
		} else {
			var content []byte
			if content, err = io.ReadAll(in); err == nil {
				err = os.WriteFile(at, content, h.FileInfo().Mode().Perm())
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

const imageLimit = 40e6 // bytes of the compressed layer

func TestImageIsSmallAndTheSameWhoeverBuildsItAndRunsWithAReadOnlyRoot(t *testing.T) {
	vars := []string{"IMAGE=fingerpost:test", "VERSION=v0.0.0-test"}
	files, first, said := builtImage(t, "022", "image", "bin/fingerpost-image.tar", vars...)
	digest, config, layer := parts(t, files, "fingerpost:test")
	t.Logf("%s, %.1f MB compressed", digest, float64(len(layer))/1e6)
	if !strings.HasSuffix(said, fmt.Sprintf("fingerpost:test %s %d bytes compressed", digest, len(layer))) {
		t.Errorf("make image says %q of %s", said, digest)
	}
	if len(layer) > imageLimit {
		t.Errorf("%d bytes compressed, want %d at most", len(layer), int(imageLimit))
	}
	// In another directory, at another time, by somebody with another umask.
	if _, second, _ := builtImage(t, "077", "image", "bin/fingerpost-image.tar", vars...); !bytes.Equal(first, second) {
		t.Error("another build gave another archive")
	}
	if config.OS != "linux" || config.Architecture != runtime.GOARCH || strings.Join(config.Config.Entrypoint, " ") != "/fingerpost" ||
		strings.Join(config.Config.Cmd, " ") != "agent" || config.Config.Labels["org.opencontainers.image.version"] != "v0.0.0-test" || config.Config.User != "" {
		t.Errorf("config is %+v", config)
	}
	root := t.TempDir()
	list := extract(t, layer, root)
	if len(list) != 1 || list[0].Name != "fingerpost" || list[0].Mode != 0o755 || list[0].Uid != 0 || list[0].Gid != 0 || list[0].ModTime.Unix() != 0 {
		t.Errorf("the layer has %+v, want the program alone, of root and without a time", list)
	}
	runsReadOnly(t, root)
}

// runsReadOnly starts the agent in the root of its image, which is read-only,
// with no directory but those of the DaemonSet, and without capabilities.
func runsReadOnly(t *testing.T, root string) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount")
	}
	pod, agent := agentPod(t)
	host := t.TempDir()
	mounts := []string{"mount --make-rprivate /", `mount --bind "$root" "$root"`}
	for _, m := range agent.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		at := filepath.Join(host, pod.Volumes[i].HostPath.Path)
		for _, dir := range []string{at, filepath.Join(root, m.MountPath)} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		mounts = append(mounts, fmt.Sprintf(`mount --bind %q "$root"%s`, at, m.MountPath))
	}
	world := filepath.Join(host, "world")
	for _, dir := range []string{world, filepath.Join(root, "world"), filepath.Join(root, "proc")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(world, "pods.yaml"), []byte("apiVersion: v1\nkind: List\nitems: []\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	before := tree(t, root)
	mounts = append(mounts, `mount --bind /proc "$root"/proc`, fmt.Sprintf(`mount --bind %q "$root"/world`, world),
		`mount -o remount,bind,ro "$root"/world`, `mount -o remount,bind,ro "$root"`,
		// chroot itself needs one capability; its child loses nothing by it.
		`exec setpriv --bounding-set=-all,+sys_chroot --no-new-privs chroot "$root" /fingerpost "$@"`)
	cmd := exec.Command("unshare", append([]string{"--mount", "sh", "-euc", strings.Join(mounts, "\n"), "sh"},
		"agent", "--source=file:/world", "--takeover", "--node-name=n", "--http-address=127.0.0.1:0", "--peer-address=", "--state-dir=/var/lib/fingerpost")...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "root=" + root}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	runtime.LockOSThread() // Pdeathsig is of the thread
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	ended := false
	defer func() {
		if !ended {
			_ = cmd.Process.Kill()
			t.Log("the agent had to be killed:", <-done)
		}
		if t.Failed() {
			t.Logf("the agent:\n%s", log.String())
		}
	}()
	harness.Eventually(t, 30*time.Second, func() error {
		status := func(flags ...string) ([]byte, error) {
			return exec.Command(filepath.Join(root, "fingerpost"), append(flags, "--admin-socket", filepath.Join(host, "run/fingerpost-admin/admin.sock"))...).CombinedOutput()
		}
		if out, err := status("status", "--ready"); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		out, err := status("status", "-o", "json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var s struct{ Parts map[string]string }
		if err := json.Unmarshal(out, &s); err != nil || s.Parts["checkpoint"] != "on" {
			return fmt.Errorf("the state cannot be written: %w, %v", err, s.Parts)
		}
		return nil
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		ended = true
		if err != nil {
			t.Errorf("on SIGTERM the agent ends with %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the agent does not end on SIGTERM")
	}
	if after := tree(t, root); !slices.Equal(before, after) {
		t.Errorf("the root was\n%v\nand is\n%v", before, after)
	}
	if strings.Contains(log.String(), "read-only file system") {
		t.Error("the agent wanted to write elsewhere")
	}
}

// tree is what is below a directory.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		list = append(list, p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestEnvoyImageHasWhatEnvoyNeeds(t *testing.T) {
	harness.Tool(t, "envoy")
	files, _, _ := builtImage(t, "022", "image-envoy", "bin/envoy-image.tar", "ENVOY_IMAGE=envoy:test")
	_, config, layer := parts(t, files, "envoy:test")
	if os.Geteuid() != 0 {
		t.Skip("needs root, for chroot")
	}
	root := t.TempDir()
	extract(t, layer, root)
	out, err := exec.Command("chroot", root, config.Config.Entrypoint[0], "--version").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "version:") {
		t.Errorf("%v: %s", err, out)
	}
}

// The Dockerfile copies what .dockerignore lets through.
func TestDockerfileGetsEveryPackageOfTheProgram(t *testing.T) {
	text, err := os.ReadFile("../.dockerignore")
	if err != nil {
		t.Fatal(err)
	}
	ignored := strings.Fields(string(text))
	cmd := exec.Command("go", "list", "-deps", "-f", `{{if .Module}}{{if .Module.Main}}{{$p := .}}{{range .GoFiles}}{{$p.Dir}}/{{.}}{{"\n"}}{{end}}{{range .EmbedFiles}}{{$p.Dir}}/{{.}}{{"\n"}}{{end}}{{end}}{{end}}`, "./cmd/fingerpost")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	top, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	files := append(strings.Fields(string(out)), filepath.Join(top, "Makefile"), filepath.Join(top, "go.mod"), filepath.Join(top, "go.sum"))
	if len(files) < 10 {
		t.Fatalf("the program has %d files", len(files))
	}
	for _, f := range files {
		rel, err := filepath.Rel(top, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, pattern := range ignored {
			whole, err := filepath.Match(pattern, rel)
			if err != nil {
				t.Fatal(err)
			}
			if whole || strings.HasPrefix(rel, pattern+"/") {
				t.Errorf("%s is needed, and .dockerignore has %s", rel, pattern)
			}
		}
	}
}

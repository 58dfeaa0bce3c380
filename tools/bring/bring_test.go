package main

import (
	"archive/zip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/tools"
)

func TestExtractRefusesAnotherChecksum(t *testing.T) {
	dir := t.TempDir()
	archive, dst := filepath.Join(dir, "a.zip"), filepath.Join(dir, "prog")
	f, err := os.Create(archive)
	if err != nil {
		t.Fatal(err)
	}
	z := zip.NewWriter(f)
	w, err := z.Create("bin/prog")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("content")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(z.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}

	if err := extract(archive, "bin/prog", strings.Repeat("0", 64), dst); err == nil || !strings.Contains(err.Error(), "sha256") {
		t.Errorf("wrong checksum gave %v", err)
	}
	for _, p := range []string{dst, dst + ".tmp"} {
		if _, err := os.Stat(p); err == nil {
			t.Errorf("%s stands after a refusal", p)
		}
	}
	sum := sha256.Sum256([]byte("content"))
	if err := extract(archive, "bin/prog", hex.EncodeToString(sum[:]), dst); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(dst); err != nil || st.Mode()&0o111 == 0 {
		t.Errorf("%s is not an executable file: %v", dst, err)
	}
}

func TestChooseTakesNamesAndGroups(t *testing.T) {
	list, err := choose([]string{"lint", "etcd"})
	if err != nil || len(list) != 2 || list[0].Name != "golangci-lint" || list[1].Name != "etcd" {
		t.Errorf("choose = %v, %v", list, err)
	}
	if _, err := choose([]string{"nosuch"}); !errors.Is(err, tools.ErrUnknown) {
		t.Errorf("unknown name gave %v", err)
	}
}

func TestKubernetesProgramsCarryTheirVersion(t *testing.T) {
	tool, err := tools.Find("kube-apiserver")
	if err != nil {
		t.Fatal(err)
	}
	if got := ldflags(tool); !strings.Contains(got, "gitVersion="+tool.Version) || !strings.Contains(got, "gitMinor=") {
		t.Errorf("ldflags = %q", got)
	}
}

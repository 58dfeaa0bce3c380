package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/test/harness"
)

// fetch gets a page over TCP.
func fetch(t *testing.T, url string) (int, string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: soon}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

func TestTakenHTTPAddressIsBoundOnceItIsFree(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	holder, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close()
	addr := holder.Addr().String()
	a := s.start(t, "--source", w.write().source(), "--http-address", addr).ready()
	harness.Eventually(t, soon, func() error {
		if part := a.status().Parts["http"]; !strings.HasPrefix(part, "off: ") || !strings.Contains(part, addr) {
			return fmt.Errorf("status says of http %q", part)
		}
		return nil
	})
	if n := len(a.services()); n != 1 {
		t.Errorf("%d services", n)
	}
	holder.Close()
	harness.Eventually(t, soon, func() error {
		code, body, err := fetch(t, "http://"+addr+"/live")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("/live: %d %s", code, body)
		}
		return err
	})
	if part := a.status().Parts["http"]; part != "on" {
		t.Errorf("status says of http %q", part)
	}
	if code, _, err := fetch(t, "http://"+addr+"/debug/pprof/"); err != nil || code != http.StatusNotFound {
		t.Errorf("pprof over TCP: %d %v", code, err)
	}
	if n := strings.Count(a.log.String(), "not free"); n != 1 {
		t.Errorf("%d lines of log about the address, want 1", n)
	}
}

func TestHealthPagesSayWhetherAndWhy(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	r.hold()
	w.serve("web-1-a", []string{"shop.Web"}, r.option())
	a := s.start(t, "--source", w.write().source()).live()
	pages := func(ready bool, why string) error {
		code, body, err := a.get("/live")
		if err != nil || code != http.StatusOK || strings.TrimSpace(body) != `{"live":true}` {
			return fmt.Errorf("/live: %d %s %w", code, body, errors.Join(err))
		}
		want := http.StatusServiceUnavailable
		if ready {
			want = http.StatusOK
		}
		var answer map[string]any
		if code, body, err = a.get("/ready"); err == nil {
			err = json.Unmarshal([]byte(body), &answer)
		}
		reason, _ := answer["reason"].(string)
		if err != nil || code != want || answer["ready"] != ready || len(answer) != 2 || !strings.Contains(reason, why) || (why == "") != (reason == "") {
			return fmt.Errorf("/ready: %d %s, want %d and reason %q (%w)", code, body, want, why, errors.Join(err))
		}
		return nil
	}
	harness.Eventually(t, soon, func() error { return pages(false, "prod/ReplicaSet/web-1") })
	r.release()
	harness.Eventually(t, soon, func() error { return pages(true, "") })

	for i := range 30 {
		w.serve(fmt.Sprintf("x%d-1-a", i), []string{fmt.Sprintf("shop.X%d", i)})
	}
	w.write()
	harness.Eventually(t, soon, func() error {
		if n := a.status().Owners["known"]; n != 31 {
			return fmt.Errorf("%d owners are known", n)
		}
		return nil
	})
	code, body, err := a.get("/metrics")
	if err != nil || code != http.StatusOK {
		t.Fatalf("/metrics: %d %v", code, err)
	}
	series, own := 0, 0
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "" {
			continue
		}
		series++
		if strings.HasPrefix(line, "fingerpost_") {
			own++
		}
		if strings.Contains(line, "shop.X") || strings.Contains(line, "uid-x") {
			t.Errorf("a series for one owner or service: %s", line)
		}
	}
	if own == 0 || series >= 300 {
		t.Errorf("%d series, %d of them of the agent; want few", series, own)
	}
	for _, want := range []string{`fingerpost_owners{knowledge="known"} 31`, `fingerpost_pods{state="serving"} 31`, "fingerpost_source_synced 1", "fingerpost_build_info{"} {
		if !strings.Contains(body, want) {
			t.Errorf("/metrics does not say %s", want)
		}
	}
}

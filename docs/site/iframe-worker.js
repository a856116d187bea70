// Search in a page that was opened as a file: browsers start no worker from files, so an iframe plays its part.
// (The theme's plugin `offline` would load such a script from another host, and looks for this name to see that one is
// there.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise((resolve) => {
        frame.addEventListener("load", () => resolve(frame.contentWindow), { once: true });
      });
      window.longctxReply = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.srcdoc =
        `<script>window.postMessage = (data) => parent.longctxReply(data);</script><script src="${url}"></script>`;
      document.body.append(frame);
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}

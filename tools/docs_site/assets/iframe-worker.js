// Search in pages that are opened as files: browsers start no worker there, so its script runs in a frame.
if (location.protocol === "file:") {
  const event = (element, name) => new Promise((resolve) => element.addEventListener(name, resolve));

  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.inside = this.start(address);
    }

    async start(address) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      const framed = event(frame, "load");
      document.body.append(frame);
      await framed;
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = address;
      const loaded = event(script, "load");
      inside.document.body.append(script);
      await loaded;
      return inside;
    }

    async postMessage(data) {
      (await this.inside).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
